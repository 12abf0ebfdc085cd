"""One test a claim that docs/sandbox.md makes for a level beyond limits."""

import os
import socket

import attack
import pytest

from tools_env import PythonSandbox
from tools_env.sandbox import LEVELS
from tools_env.sandbox.paths import visible_paths

LEVELS = [level for level in LEVELS if attack.works(level)]
BOXED = [level for level in LEVELS if level in ("namespace", "bubblewrap")]
FILTERED = [level for level in LEVELS if level != "process"]
boxed = pytest.mark.parametrize("level", BOXED)
filtered = pytest.mark.parametrize("level", FILTERED)


def run(level, code, **limits):
    with PythonSandbox(level=level, **limits) as sandbox:
        return sandbox.run(code)


@filtered
def test_no_network(level):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        result = run(level, f"import socket; socket.create_connection({address}, 2)")
    assert "PermissionError" in result.output


@filtered
def test_pairs_and_pipes_of_its_own_work(level):
    code = "import asyncio, socket\nasync def f(): return 7\n"
    code += "a, b = socket.socketpair(); a.send(b'x'); b.recv(1), asyncio.run(f())"
    assert run(level, code).output == "(b'x', 7)\n"


@filtered
def test_nothing_is_written_outside(level, tmp_path):
    tmp_path.chmod(0o777)
    for path in (tmp_path / "x", "/usr/x", "/etc/x", "/dev/x", "/proc/sys/kernel/x"):
        assert run(level, f"open({str(path)!r}, 'w')").status == "error"
    assert list(tmp_path.iterdir()) == []


@boxed
def test_temporary_files_lie_in_the_work_folder(level):
    code = "import os, tempfile; tempfile.NamedTemporaryFile(prefix='x', delete=False)"
    assert run(level, f"{code}; os.listdir('.')[0][0]").output == "'x'\n"


@boxed
def test_tmp_is_the_work_folder_unless_python_lies_there(level):
    code = "import os; open('/tmp/x', 'w').close(); os.listdir('.')"
    if any(path.startswith("/tmp/") for path in visible_paths()):
        assert "Read-only file system" in run(level, code).output
    else:
        assert run(level, code).output == "['x']\n"


@filtered
def test_only_the_system_and_python_are_read(level, tmp_path):
    (tmp_path / "key").write_text("secret")
    for path in (tmp_path / "key", "/etc/hostname", "/etc/passwd", __file__):
        code = f"print(open({str(path)!r}).read())"
        assert run(level, code).status == "error", path
    assert run(level, "import json; open(json.__file__).read()[:1]").status == "ok"


@boxed
def test_the_work_folder_is_capped(level):
    code = "for i in range(100):\n    open(str(i), 'wb').write(bytes(1_000_000))"
    with PythonSandbox(file_mb=8, level=level) as sandbox:
        assert "No space left" in sandbox.run(code).output
        assert sandbox.run("1").output == "1\n"


@boxed
def test_shared_memory_is_capped(level):
    code = "for i in range(40): open(f'/dev/shm/{i}', 'wb').write(bytes(1_000_000))"
    assert "No space left" in run(level, code).output


@boxed
def test_other_processes_are_out_of_sight(level):
    assert f"'{os.getpid()}'" not in run(level, "import os; os.listdir('/proc')").output
    code = f"import os; os.kill({os.getpid()}, 0)"
    assert "ProcessLookupError" in run(level, code).output


@pytest.mark.skipif("namespace" not in BOXED, reason="namespaces are refused here")
def test_a_session_sees_itself_and_its_keeper():
    code = "import os; [p for p in os.listdir('/proc') if p.isdigit()]"
    assert run("namespace", code).output == "['1', '2']\n"


@filtered
def test_no_signal_leaves(level):
    code = f"import os\nfor n in (0, 9, 15, 19): os.kill({os.getpid()}, n)"
    assert run(level, code).status == "error"
    code = "import os\nfor n in (9, 15, 19): os.kill(os.getppid(), n)"
    with PythonSandbox(level=level) as sandbox:
        sandbox.run(code)
        assert sandbox.run("1").output == "1\n"


@filtered
def test_no_privilege_is_held_or_gained(level):
    code = "{l.split()[0]: l.split()[1] for l in open('/proc/self/status') if ':' in l"
    code += " and len(l.split()) > 1}"
    status = eval(run(level, code).output)
    assert status["NoNewPrivs:"] == "1" and status["Seccomp:"] == "2"
    allowed = 1 << 2  # reading the interpreter's own files, where others may not
    for name in ("CapEff:", "CapPrm:", "CapBnd:"):
        assert not int(status[name], 16) & ~allowed or os.getuid(), name
    if os.getuid() == 0:
        assert status["Uid:"] != "0"


@filtered
def test_system_calls_are_refused(level):
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    code += "libc.mount(None, b'/', None, 4096 | 32, None), libc.sethostname(b'x', 1)"
    assert run(level, code).output == "(-1, -1)\n"
    assert "PermissionError" in run(level, "import os; os.memfd_create('x')").output


@filtered
def test_threads_and_children_still_work(level):
    code = "import subprocess, threading\nt = threading.Thread(target=print, args=(1,))"
    code += "\nt.start(); t.join()\nsubprocess.run(['echo', '2']); None"
    assert run(level, code).output == "1\n2\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give the code another user")
@pytest.mark.parametrize("level", LEVELS)
def test_sessions_of_root_have_users_of_their_own(level):
    code = "import os; os.getuid()"
    with PythonSandbox(level=level) as a, PythonSandbox(level=level) as b:
        users = {a.run(code).output, b.run(code).output, f"{os.getuid()}\n"}
    assert len(users) == 3
