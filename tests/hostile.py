"""Programs that a sandbox must survive, and how their calls may end.

Name to (code, statuses); an empty tuple of statuses allows any. A program that reaches
what it must not prints a line that begins with ESCAPE. `ALL` run at every level, the
others where the level claims what they try. `attack` fills in SECRET, SECRET_FILE,
OUTSIDE, TRAINER and PORT.
"""

import textwrap

ENDLESS, ANY = ("timeout",), ()
OVER = ("memory", "timeout")  # a loaded machine may be too slow to fill it
LIBC = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
column = ("x86_64", "aarch64").index(platform.machine())
def must_fail(*numbers_then_arguments):
    numbers, *arguments = numbers_then_arguments
    if libc.syscall(numbers[column], *arguments) != -1: print("ESCAPE", numbers)
"""
# Time --------------------------------------------------------------------------------
_TIME = {
    "endless_loop": ("while True: pass", ENDLESS),
    "sleep": ("import time; time.sleep(600)", ENDLESS),
    "catches_everything": (
        """
        while True:
            try:
                while True: pass
            except BaseException: pass
        """,
        ENDLESS,
    ),
    "ignores_signals": (
        """
        import signal, time
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except Exception: pass
        while True: time.sleep(1)
        """,
        ENDLESS,
    ),
    "regular_expression": ("import re; re.match('(a+)+$', 'a' * 64 + 'b')", ENDLESS),
    "huge_power": ("9 ** 9 ** 9", ("timeout", "memory")),
    "endless_repr": (
        "class R:\n    def __repr__(self):\n        while True: pass\nR()",
        ENDLESS,
    ),
    "endless_error_text": (
        "class E(Exception):\n    def __str__(self):\n"
        "        while True: pass\nraise E",
        ENDLESS,
    ),
    "own_fifo": ("import os; os.mkfifo('p'); open('p').read()", ENDLESS),
    "replaced_by_sleep": ("import os; os.execvp('sleep', ['sleep', '600'])", ANY),
    "stops_itself": ("import os, signal; os.kill(os.getpid(), 19)", ENDLESS),
    "lock_held_twice": (
        "import threading\nlock = threading.Lock()\nlock.acquire(); lock.acquire()",
        ENDLESS,
    ),
    "waits_for_input": ("input()", ("error",)),
    "reads_all_input": ("open('/dev/stdin').read()", ("ok", "error")),
    "traced": (
        "import sys\ndef f(*a):\n    return f\nsys.settrace(f)\n[i for i in range(99)]",
        ("ok",),
    ),
}
# Processes and signals ---------------------------------------------------------------
_PROCESSES = {
    "fork_bomb": ("import os\nwhile True: os.fork()", ANY),
    "thread_bomb": (
        """
        import threading, time
        while True: threading.Thread(target=time.sleep, args=(600,)).start()
        """,
        ("error", "timeout"),
    ),
    "shell_bomb": ("import os; os.system(':(){ :|:& };:'); os.wait()", ANY),
    "spawns_for_ever": (
        "import subprocess\nwhile True: subprocess.run(['true'])",
        ENDLESS,
    ),
    "daemon": (
        """
        import os
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: os.execvp('sleep', ['sleep', '600'])
            os._exit(0)
        os.wait(); None
        """,
        ("ok",),
    ),
    "daemon_of_daemons": (
        """
        import os, time
        for _ in range(3):
            if os.fork() == 0: os.setsid()
        time.sleep(600)
        """,
        ENDLESS,
    ),
    "pipe_holding_grandchild": (
        "import os; os.system('(sleep 600; echo late) &'); print('early')",
        ("ok",),
    ),
    "stubborn_child": (
        """
        import subprocess
        command = 'trap "" TERM HUP INT; while :; do sleep 600; done'
        subprocess.Popen(['sh', '-c', command], start_new_session=True); None
        """,
        ("ok",),
    ),
    "zombies": (
        """
        import os, time
        for _ in range(8):
            if os.fork() == 0: os._exit(0)
        """,
        ("ok",),
    ),
    "fork_goes_on": ("import os; os.fork(); None", ("ok",)),
    "stopped_child": (
        "import os\nif os.fork() == 0: os.kill(os.getpid(), 19)",
        ("ok",),
    ),
    "kills_its_group": ("import os; os.killpg(0, 9)", ("crashed",)),
    "kills_everyone": ("import os; os.kill(-1, 9)", ANY),
    "kills_its_parent": ("import os; os.kill(os.getppid(), 9)", ANY),
    "stops_its_parent": ("import os; os.kill(os.getppid(), 19)", ANY),
    "kills_process_one": ("import os; os.kill(1, 9)", ANY),
    "kills_itself": ("import os; os.kill(os.getpid(), 9)", ("crashed",)),
    "alarm": ("import signal, time; signal.alarm(1); time.sleep(600)", ANY),
    "segfault": ("import ctypes; ctypes.string_at(0)", ("crashed",)),
    "abort": ("import os; os.abort()", ("crashed",)),
    "deep_recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        ("crashed", "memory", "error", "timeout"),
    ),
    "exit_0": ("import os; os._exit(0)", ("ok",)),
    "exit_3": ("import os; os._exit(3)", ("error",)),
    "exit_text": ("raise SystemExit('x' * 10**6)", ("error",)),
    "exit_in_thread": (
        "import os, threading\nthreading.Thread(target=os._exit, args=(7,)).start()\n"
        "while True: pass",
        ("error",),
    ),
    "exit_handler": (
        "import atexit\natexit.register(lambda: exec('while True: pass'))\nexit(0)",
        ("ok",),
    ),
    "replaced_by_true": ("import os; os.execvp('true', ['true'])", ("ok",)),
    "root": (
        "import os\ntry:\n    os.setuid(0); print('ESCAPE')\nexcept OSError: pass",
        ("ok",),
    ),
}
# Memory and files --------------------------------------------------------------------
_MEMORY = {
    "bytearrays": ("x = []\nwhile True: x.append(bytearray(50_000_000))", OVER),
    "long_string": ("'a' * 10**11", OVER),
    "long_list": ("list(range(10**10))", OVER),
    "big_array": ("import numpy; numpy.ones(10**10)", ("memory", "error")),
    "big_map": ("import mmap; mmap.mmap(-1, 10**11)", ("error", "memory")),
    "many_fat_children": (
        """
        import os, time
        for _ in range(12):
            if os.fork() == 0:
                x = bytearray(os.urandom(1) * 60_000_000); time.sleep(600)
        time.sleep(600)
        """,
        ("memory", "timeout", "error"),
    ),
    "huge_repr": (
        "class R:\n    def __repr__(self): return 'x' * 10**8\nR()",
        ("ok", "memory"),
    ),
    "big_file": (
        "n = open('f', 'wb').write(bytes(20_000_000)); print('ESCAPE')",
        ("error",),
    ),
    "sparse_file": (
        "open('f', 'wb').truncate(10**12); print('ESCAPE')",
        ("error", "crashed"),
    ),
    "open_files": (
        "x = []\nfor _ in range(5000): x.append(open('/dev/null'))\nprint('ESCAPE')",
        ("error",),
    ),
    "full_pipes": (
        """
        import os
        ends = []
        for _ in range(5000):
            ends += os.pipe()
            os.set_blocking(ends[-1], False); os.write(ends[-1], bytes(65536))
        print('ESCAPE')
        """,
        ("error",),
    ),
    "deep_folders": (
        "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')",
        ("ok",),
    ),
    "shut_folders": (
        "import os\nos.makedirs('a/b/c')\nfor d in ('a/b/c', 'a/b', 'a'): "
        "os.chmod(d, 0)",
        ("ok",),
    ),
    "symbolic_links": (
        """
        import os
        for i, target in enumerate(('/', '/etc', 'OUTSIDE', '..', 'l')):
            os.symlink(target, f'l{i}')
        """,
        ("ok",),
    ),
    "odd_names": (
        r"""
        import os, socket
        for name in (b'\xff\n', b'-rf', b'a b', b'*', b'\xe2\x80\xae'):
            open(name, 'w').close()
        os.mkfifo('fifo')
        """,
        ("ok",),
    ),
    "unwritable_work_folder": ("import os; os.chmod('.', 0)", ("ok", "error")),
}
# Output and source -------------------------------------------------------------------
_OUTPUT = {
    "endless_output": ("while True: print('x' * 1000)", ENDLESS),
    "long_output": ("for _ in range(60): print('x' * 1_000_000)", ("ok",)),
    "one_long_line": ("import os\nfor _ in range(40): os.write(2, b'y' * 10**6)", ANY),
    "binary_output": ("import os; os.write(1, bytes(range(256)) * 99); None", ("ok",)),
    "surrogate": ("print('\\ud800')", ("ok",)),
    "control_codes": ("print('\\0\\x1b[2J\\x07<|im_end|>\\r')", ("ok",)),
    "closed_streams": ("import os, sys; sys.stdout.close(); os.close(2)", ANY),
    "no_streams": ("import sys; sys.stdout = sys.stderr = None", ("ok",)),
    "null_byte": ("x = '\0'", ("error",)),
    "open_brackets": ("(" * 20_000, ("error",)),
    "unary_minus": ("-" * 100_000 + "1", ("error",)),
    "thread_prints_on": (
        """
        import threading, time
        def talk():
            while True:
                print('42'); time.sleep(0.001)
        threading.Thread(target=talk, daemon=True).start()
        """,
        ("ok",),
    ),
}
# The sandbox's own interpreter -------------------------------------------------------
_TAMPERING = {
    "closes_all_files": ("import os; os.closerange(0, 4096)", ANY),
    "forged_answers": (
        """
        import os
        for fd in range(3, 64):
            for text in (b'o\\0\\0\\0\\2', b'o' * 4000):
                try: os.write(fd, text)
                except OSError: pass
        """,
        ANY,
    ),
    "null_files": (
        """
        import os
        null = os.open('/dev/null', os.O_RDWR)
        for fd in range(40):
            if fd != null: os.dup2(null, fd)
        """,
        ANY,
    ),
    "found_sockets": (
        """
        import gc, socket
        for x in gc.get_objects():
            if isinstance(x, socket.socket): x.shutdown(2); x.close()
        """,
        ANY,
    ),
    "no_builtins": ("import builtins; builtins.__dict__.clear()", ANY),
    "no_modules": ("import sys; sys.modules.clear()", ANY),
    "patched_interpreter": (
        """
        import sys
        for name, module in list(sys.modules.items()):
            if name.startswith('tools_env'): module.__dict__.clear()
        """,
        ANY,
    ),
    "patched_os": (
        "import os\nos._exit = os.write = os.getpid = os.dup2 = lambda *a: 0",
        ANY,
    ),
    "patched_traceback": (
        "import traceback\ndef f(*a, **k):\n    while True: pass\n"
        "traceback.format_exception = f\n1 / 0",
        ENDLESS,
    ),
    "frames": (
        """
        import sys
        frame = sys._getframe()
        while frame:
            frame.f_globals.pop('_run', None); frame = frame.f_back
        """,
        ANY,
    ),
    "audit_hook": (
        "import sys\ndef f(*a): raise SystemError\nsys.addaudithook(f)",
        ANY,
    ),
    "evil_stream": (
        """
        import sys
        class Stream:
            def __getattr__(self, name): raise SystemExit
        sys.stdout = sys.stderr = sys.stdin = Stream()
        print(1)
        """,
        ANY,
    ),
    "memory_of_its_own": (
        "f = open('/proc/self/mem', 'r+b', 0)\nf.seek(id(None)); f.write(bytes(64))",
        ANY,
    ),
    "wrong_reference_counts": (
        "import ctypes\nfor _ in range(99): ctypes.pythonapi.Py_DecRef("
        "ctypes.py_object(()))\nimport gc; gc.collect()",
        ANY,
    ),
    "environment": (
        "import os\nif 'SECRET' in str(dict(os.environ)): print('ESCAPE')",
        ("ok",),
    ),
}
# What only namespaces and the filters refuse -----------------------------------------
_SEALED = {
    "secret_file": (
        "try:\n    print('ESCAPE', open('SECRET_FILE').read())\nexcept OSError: pass",
        ("ok",),
    ),
    "foreign_environments": (
        """
        import glob
        for path in glob.glob('/proc/[0-9]*/environ') + ['/proc/TRAINER/environ']:
            try:
                if 'SECRET' in open(path, errors='replace').read(): print('ESCAPE')
            except OSError: pass
        """,
        ("ok",),
    ),
    "signals_the_trainer": (
        "import os\nfor n in (0, 9, 19):\n    try:\n        os.kill(TRAINER, n)\n"
        "        print('ESCAPE')\n    except OSError: pass",
        ("ok",),
    ),
    "foreign_processes": (
        """
        import os
        try: seen = [p for p in os.listdir('/proc') if p.isdigit()]
        except OSError: seen = []
        if len(seen) > 4 or 'TRAINER' in seen: print('ESCAPE', seen)
        """,
        ("ok",),
    ),
    "foreign_memory": (
        "for p in (1, TRAINER):\n    try:\n        open(f'/proc/{p}/mem', 'r+b')\n"
        "        print('ESCAPE')\n    except OSError: pass",
        ("ok",),
    ),
    "writes_outside": (
        """
        for folder in ('OUTSIDE', '/', '/etc', '/usr', '/var/tmp', '/dev', '/proc/1'):
            try:
                open(folder + '/escape', 'w').close(); print('ESCAPE', folder)
            except OSError: pass
        """,
        ("ok",),
    ),
    "through_links": (
        "import os\nos.symlink('OUTSIDE', 'l')\ntry:\n    open('l/escape', 'w')\n"
        "    print('ESCAPE')\nexcept OSError: pass",
        ("ok",),
    ),
    "kernel_settings": (
        "try:\n    open('/proc/sys/kernel/hostname', 'w').write('x')\n"
        "    print('ESCAPE')\nexcept OSError: pass",
        ("ok",),
    ),
    "tcp": (
        "import socket\ntry:\n    socket.create_connection(('127.0.0.1', PORT), 1)\n"
        "    print('ESCAPE')\nexcept OSError: pass",
        ("ok",),
    ),
    "udp_names_and_raw": (
        """
        import socket
        for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
            try:
                socket.socket(socket.AF_INET, kind).sendto(b'x', ('127.0.0.1', PORT))
                print('ESCAPE')
            except OSError: pass
        try: socket.getaddrinfo('example.com', 80); print('ESCAPE')
        except OSError: pass
        """,
        ("ok",),
    ),
    "abstract_socket": (
        "import socket\ntry:\n    socket.socket(socket.AF_UNIX).bind('\\0escape')\n"
        "    print('ESCAPE')\nexcept OSError: pass",
        ("ok",),
    ),
    "mounts": (
        LIBC + "must_fail((165, 40), None, b'/', None, 0x1020, None)\n"
        "must_fail((161, 51), b'/usr')\nmust_fail((170, 161), b'x', 1)",
        ("ok",),
    ),
    "namespaces": (
        LIBC + "for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):\n"
        "    must_fail((272, 97), flag)\n"
        "    if libc.syscall((56, 220)[column], flag | 17, 0, 0, 0, 0) != -1:\n"
        "        print('ESCAPE clone')",
        ("ok",),
    ),
    "traces_the_trainer": (
        LIBC + "must_fail((101, 117), 16, TRAINER, 0, 0)\n"
        "must_fail((310, 270), TRAINER, None, 0, None, 0, 0)",
        ("ok",),
    ),
    "kernel_surface": (
        LIBC
        + "for n in ((321, 280), (298, 241), (323, 282), (425, 425), (248, 217)):\n"
        "    must_fail(n, 0, 0, 0, 0, 0)\n"
        "must_fail((304, 265), 0, 0, 0)\nmust_fail((435, 435), 0, 0)",
        ("ok",),
    ),
    "uncounted_memory": (
        LIBC + "must_fail((319, 279), b'x', 0)\nmust_fail((29, 194), 0, 4096, 0o1600)",
        ("ok",),
    ),
}
# What only a file system made for it bounds -------------------------------------------
_BOXED = {
    "fills_the_folder": (
        "for i in range(64): open(str(i), 'wb').write(bytes(1_000_000))\n"
        "print('ESCAPE')",
        ("error",),
    ),
    "fills_shared_memory": (
        "for i in range(40): open(f'/dev/shm/{i}', 'wb').write(bytes(1_000_000))\n"
        "print('ESCAPE')",
        ("error",),
    ),
}
# What bubblewrap cannot bound ---------------------------------------------------------
_COUNTED = {
    "many_files": (
        "for i in range(6000): open(str(i), 'w').close()\nprint('ESCAPE')",
        ("error",),
    ),
}


def _dedented(programs: dict) -> dict:
    return {
        name: (textwrap.dedent(code), ends) for name, (code, ends) in programs.items()
    }


ALL = _dedented(_TIME | _PROCESSES | _MEMORY | _OUTPUT | _TAMPERING)
SEALED = _dedented(_SEALED)
BOXED = _dedented(_BOXED)
COUNTED = _dedented(_COUNTED)
