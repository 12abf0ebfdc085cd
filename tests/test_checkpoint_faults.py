"""What can happen to the files of a checkpoint, one fault at a time.

Whatever it is, the newest step falls back to the one before it, which is named with the
reason and used bit for bit; nothing is restored from a mixture.
"""

import os
import resource
import shutil

import pytest
from ml_collections import ConfigDict
from test_checkpoints import bits, folder_hash, make_state, restore_latest

from grpo_jax import checkpoints, policy
from grpo_jax.checkpoints import Checkpoints, SaveError
from grpo_jax.config import BadInput


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Complete steps 10 and 20 that hold different values; to be copied."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    saver = Checkpoints(folder, keep=3)
    for step in (10, 20):
        saver.save(step, arrays(step), {"cursor": step})
    saver.close()
    return folder


@pytest.fixture
def two_steps(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def arrays(step):
    """What the trainer saves, as far as these tests look at it."""
    state = make_state(scale=float(step))
    return {"state": state, "reference": state["adapters"]}


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def grow(file):
    file.write_bytes(file.read_bytes() + b"x")


def make_folder(file):
    file.unlink()
    file.mkdir()


def dangle(file):
    file.unlink()
    file.symlink_to("nowhere")


FAULTS = {
    "cut": cut,
    "empty": lambda file: file.write_bytes(b""),
    "bit": flip,
    "longer": grow,
    "removed": lambda file: file.unlink(),
    "folder": make_folder,
    "link": dangle,
}
# Of every kind of file that a step consists of, by what its path begins with.
PARTS = ("manifest.json", "arrays/_METADATA", "arrays/manifest.ocdbt", "arrays/d/")
PARTS += ("arrays/_CHECKPOINT_METADATA", "arrays/_sharding", "arrays/array_metadatas/")
PARTS += ("arrays/ocdbt.process_0/",)


def part_of(step, part):
    found = [p for p in sorted(step.rglob("*")) if p.is_file()]
    matching = [p for p in found if str(p.relative_to(step)).startswith(part)]
    assert matching, f"{part} is none of {found}"
    return max(matching, key=lambda p: p.stat().st_size)


def test_the_parts_are_those_of_a_step(saved):
    step = saved / "step_000020"
    names = {str(p.relative_to(step)) for p in step.rglob("*") if p.is_file()}
    missed = {name for name in names if not name.startswith(PARTS)}
    assert missed <= {"arrays/commit_success.txt"}  # one line


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_CK3_a_faulty_file_is_named_and_the_step_before_is_used(
    two_steps, part, fault, caplog
):
    newest = two_steps / "step_000020"
    FAULTS[fault](part_of(newest, part))
    # A run that only reads leaves everything as it is.
    found = checkpoints.find(two_steps)
    assert (found.step, found.meta) == (10, {"cursor": 10}) and newest.is_dir()
    assert "step_000020 is incomplete (" in caplog.text
    saver = Checkpoints(two_steps, keep=2)
    step, restored, meta = restore_latest(saver, arrays(0))
    assert (step, meta) == (10, {"cursor": 10})
    assert bits(restored) == bits(arrays(10))
    assert saver.steps() == [10]


def test_a_copy_under_another_name_is_no_step(two_steps, caplog):
    shutil.copytree(two_steps / "step_000010", two_steps / "step_000030")
    assert checkpoints.find(two_steps).step == 20
    assert "step_000030 is incomplete (it is a copy of step 10)" in caplog.text


def test_a_changed_host_state_is_noticed(two_steps, caplog):
    """A digit of the cursor: still JSON, and every array is right."""
    manifest = two_steps / "step_000020" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"cursor": 20', '"cursor": 21'))
    assert checkpoints.find(two_steps).step == 10
    assert "manifest.json has changed" in caplog.text


@pytest.mark.parametrize("where", ["orbax", "manifest", "rename", "permission"])
def test_CK3_a_save_that_fails_says_what_is_kept(two_steps, where, monkeypatch):
    saver = Checkpoints(two_steps, keep=1)
    before = folder_hash(two_steps)

    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    def forbidden(*_, **__):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        match where:
            case "orbax":
                patch.setattr(saver._checkpointer, "save", fails)
            case "manifest":
                patch.setattr(checkpoints, "_write_manifest", fails)
            case "rename":
                patch.setattr(checkpoints, "_rename", fails)
            case "permission":
                patch.setattr(os, "rename", forbidden)
        with pytest.raises(SaveError, match="step 30 was not saved.*; 20 is kept: "):
            saver.save(30, arrays(30), {})
    assert folder_hash(two_steps) == before


# What else orbax had begun by then comes to a closed event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_CK3_a_file_that_cannot_grow_fails_a_save_and_no_other(two_steps):
    """A real limit on the size of files, met inside orbax."""
    saver = Checkpoints(two_steps, keep=1)
    before = folder_hash(two_steps)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        with pytest.raises(SaveError, match="step 30 was not saved.*20 is kept"):
            saver.save(30, arrays(30), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert folder_hash(two_steps) == before
    saver.save(30, arrays(30), {})
    assert saver.steps() == [30]


def killed(two_steps, monkeypatch, owner, name, step=30):
    """Save a step as far as one function, and leave everything as SIGKILL would."""

    class Killed(BaseException):
        pass

    def dies(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies)
        with pytest.raises(Killed):
            Checkpoints(two_steps, keep=1).save(step, arrays(step), {"cursor": step})


def test_CK3_killed_before_its_manifest_a_save_is_dropped(
    two_steps, monkeypatch, caplog
):
    killed(two_steps, monkeypatch, checkpoints, "_write_manifest")
    saver = Checkpoints(two_steps, keep=1)
    assert saver.newest().step == 20 and "its save was cut off" in caplog.text
    assert sorted(p.name for p in two_steps.iterdir()) == ["step_000010", "step_000020"]


@pytest.mark.parametrize("step", [30, 20])
@pytest.mark.parametrize("half", [False, True])
def test_CK3_killed_before_its_name_a_save_is_completed(
    two_steps, monkeypatch, step, half
):
    """Also where it was to take the place of an older one, half deleted by then."""
    killed(two_steps, monkeypatch, checkpoints, "_rename", step)
    if half:
        shutil.rmtree(two_steps / "step_000020" / "arrays")
    assert checkpoints.find(two_steps).step == (10 if half else 20)  # only reading
    saver = Checkpoints(two_steps, keep=1)
    found, restored, meta = restore_latest(saver, arrays(0))
    assert (found, meta) == (step, {"cursor": step})
    assert bits(restored) == bits(arrays(step))


def test_CK3_killed_in_the_deletion_of_older_steps(two_steps, monkeypatch):
    killed(two_steps, monkeypatch, Checkpoints, "_prune")
    saver = Checkpoints(two_steps, keep=1)
    assert saver.steps() == [10, 20, 30] and saver.newest().step == 30
    saver.save(40, arrays(40), {})
    assert saver.steps() == [40]


def test_a_folder_that_is_a_file_is_bad_input(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(BadInput, match="not a folder|cannot be written"):
        Checkpoints(tmp_path / "checkpoints", keep=1)


# checkpoint.load --------------------------------------------------------------------


def chosen(workdir, load, best=""):
    config = ConfigDict({"checkpoint": {"load": load, "best": best}})
    return policy.find(config, workdir)


@pytest.fixture
def scored(tmp_path):
    """A workdir with steps 1 to 4, of which 2 has the best score."""
    saver = Checkpoints(tmp_path / "checkpoints", keep=4, best_metric="eval/a")
    for step, score in [(1, 0.1), (2, 0.9), (3, None), (4, 0.5)]:
        saver.save(step, arrays(step), {}, score)
    return tmp_path


def test_the_checkpoint_that_is_asked_for(scored, caplog):
    assert chosen(scored, "newest").step == 4
    assert chosen(scored, "best", "eval/a").step == 2
    found = chosen(scored, "3")
    assert (found.step, found.path.name) == (3, "step_000003")
    with pytest.raises(BadInput, match="no step 7; saved steps: 1, 2, 3, 4"):
        chosen(scored, "7")
    with pytest.raises(BadInput, match="score by checkpoint.best='eval/b'; saved"):
        chosen(scored, "best", "eval/b")


def test_one_that_is_asked_for_and_damaged_has_no_stand_in(scored, caplog):
    flip(part_of(scored / "checkpoints" / "step_000002", "arrays/d/"))
    for load in ("best", "2"):
        with pytest.raises(BadInput, match=r"step_000002 is incomplete \(.*changed"):
            chosen(scored, load, "eval/a")
    assert chosen(scored, "newest").step == 4
    for step in (1, 3, 4):
        flip(part_of(scored / "checkpoints" / f"step_00000{step}", "arrays/d/"))
    with pytest.raises(
        BadInput, match="no complete checkpoint.*step_000004: .*changed"
    ):
        chosen(scored, "newest")


def test_where_nothing_was_ever_saved_there_is_nothing_to_load(tmp_path):
    assert chosen(tmp_path, "newest") is None
    with pytest.raises(BadInput, match="no step 3; saved steps: none"):
        chosen(tmp_path, "3")
