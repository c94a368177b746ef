"""Programs that try to get out, to stay, to take everything, or to pass without an answer."""

from __future__ import annotations

from pathlib import Path

C = "import ctypes, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def programs(secret: Path, marker: Path, pid: int) -> dict[str, str]:
    """All of them by name, see `groups`."""
    return {name: source for group in groups(secret, marker, pid).values() for name, source in group.items()}


def groups(secret: Path, marker: Path, pid: int) -> dict[str, dict[str, str]]:
    """By what they try, and by name. Beside `marker` lie a FIFO and two sockets of the host, `fifo`, `stream` and `datagram`. `secret` is a host file whose content must not come out, `marker` a host file that must not be made, `pid` the
    process that runs the sandbox.
    """
    fifo, stream, datagram = (marker.with_name(name) for name in ("fifo", "stream", "datagram"))
    read = {
        "read the host's file": f"print(open({str(secret)!r}).read())",
        "read it by symlink": f"import os; os.symlink({str(secret)!r}, '/tmp/l'); print(open('/tmp/l').read())",
        "read it by hard link": f"import os; os.link({str(secret)!r}, '/tmp/l'); print(open('/tmp/l').read())",
        "read it by dots": f"print(open('/tmp/../../../..{secret}').read())",
        "read it through /proc/1/root": f"print(open('/proc/1/root{secret}').read())",
        "read it through the parent's root": f"print(open('/proc/{pid}/root{secret}').read())",
        "read it through own root": f"print(open('/proc/self/root{secret}').read())",
        "read it through cwd": f"print(open('/proc/self/cwd/../../..{secret}').read())",
        "read every descriptor": "import os\nfor i in range(3, 200):\n  try: print(os.read(i, 1000))\n  except OSError: pass",
        "read every descriptor of init": (
            "import os\nfor p in os.listdir('/proc'):\n  if p.isdigit():\n    try:\n      for f in os.listdir(f'/proc/{p}/fd'):\n"
            "        try: print(open(f'/proc/{p}/fd/{f}').read(1000))\n        except Exception: pass\n    except OSError: pass"
        ),
        "the environment": "import os; print(dict(os.environ)); print(open('/proc/self/environ').read())",
        "the parent's environment": f"print(open('/proc/{pid}/environ').read())",
        "every environment": "import glob\nfor f in glob.glob('/proc/*/environ'):\n  try: print(open(f).read())\n  except OSError: pass",
        "every command line": "import glob\nfor f in glob.glob('/proc/*/cmdline'):\n  print(open(f).read())",
        "passwords": "print(open('/etc/shadow').read())",
        "home": "import os\nfor f, _, n in os.walk('/root'): print(f, n)",
        "walk everything": "import os\nfor f, _, n in os.walk('/'):\n  if not f.startswith(('/usr', '/proc', '/python')): print(f, n)",
        "kernel memory": "print(open('/dev/mem','rb').read(10)); print(open('/proc/kcore','rb').read(10))",
        "kernel log": C + "b = ctypes.create_string_buffer(1000); print(libc.klogctl(3, b, 1000)); assert 0",
        "block devices": "import os; os.mknod('/tmp/d', 0o60600, os.makedev(8, 0)); print(open('/tmp/d','rb').read(100))",
        "open_by_handle_at": C + "assert libc.syscall(304, -1, 0, 0) == 0",
    }
    write = {
        "write the marker": f"open({str(marker)!r}, 'w')",
        "write through /proc/1/root": f"open('/proc/1/root{marker}', 'w')",
        "write through the parent": f"open('/proc/{pid}/root{marker}', 'w')",
        "overwrite the secret": f"open({str(secret)!r}, 'w').write('x')",
        "delete the secret": f"import os; os.unlink({str(secret)!r})",
        "overwrite the checker": "open('/driver.py', 'w').write('x')",
        "replace the checker": "import os; os.rename('/tmp', '/driver.py')",
        "overwrite Python": "import os, sys; p = os.__file__; open(p, 'a').write('x')",
        "a file in the root": "open('/x', 'w')",
        "a file in /usr": "open('/usr/x', 'w')",
        "a file in /dev": "open('/dev/x', 'w')",
        "a kernel setting": "open('/proc/sys/kernel/hostname', 'w').write('x')",
        "core pattern": f"open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/touch {marker}')",
        "every setting of the kernel": (
            "import glob\nfor f in glob.glob('/proc/sys/**', recursive=True):\n  try: open(f, 'r+').write('1')\n  except OSError: pass\n"
            "  else: print('written', f)"
        ),
        "sysrq": "open('/proc/sysrq-trigger', 'w').write('c')",
        "a control group": "import os; os.makedirs('/sys/fs/cgroup/x'); open('/sys/fs/cgroup/x/release_agent', 'w')",
        "setuid copy": "import os, shutil; shutil.copy('/bin/sh', '/tmp/sh'); os.chown('/tmp/sh', 0, 0); os.chmod('/tmp/sh', 0o4755)",
    }
    kernel = {
        "become root": "import os; os.setuid(0)",
        "su": "import subprocess; subprocess.run(['su', '-c', 'id'], check=True)",
        "sudo": "import subprocess; subprocess.run(['sudo', '-n', 'id'], check=True)",
        "mount": C + "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
        "remount": C + "assert libc.mount(b'none', b'/', None, 32, None) == 0",
        "umount": C + "assert libc.umount2(b'/tmp', 0) == 0",
        "pivot_root": C + "assert libc.syscall(155, b'/tmp', b'/tmp') == 0",
        "chroot": "import os; os.mkdir('/tmp/r'); os.chroot('/tmp/r')",
        "new user namespace": C + "assert libc.unshare(0x10000000) == 0",
        "new mount namespace": C + "assert libc.unshare(0x00020000) == 0",
        "root anew": C + "assert libc.syscall(117, 0, 0, 0) == 0",
        "a call that no list knows": C + "assert libc.syscall(461, 0, 0, 0) >= 0",
        "clone a namespace": C + "assert libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0",
        "clone3": C + "assert libc.syscall(435, (ctypes.c_uint64 * 8)(), 64) >= 0",
        "setns": "import os; os.setns(os.open('/proc/1/ns/net', 0))",
        "ptrace the parent": C + f"assert libc.ptrace(16, {pid}, 0, 0) == 0",
        "ptrace init": C + "assert libc.ptrace(16, 1, 0, 0) == 0",
        "read memory of init": C + "assert libc.syscall(310, 1, 0, 0, 0, 0, 0) >= 0",
        "memory of init": "open('/proc/1/mem', 'rb').read(1)",
        "bpf": C + "assert libc.syscall(321, 0, 0, 0) == 0",
        "perf": C + "assert libc.syscall(298, 0, 0, -1, -1, 0) >= 0",
        "userfaultfd": C + "assert libc.syscall(323, 0) >= 0",
        "io_uring": C + "assert libc.syscall(425, 1, (ctypes.c_char * 120)()) >= 0",
        "keyring": C + "assert libc.syscall(250, 0, -3, 0) >= 0",
        "load a module": C + "assert libc.syscall(175, 0, 0, b'') == 0",
        "reboot": C + "assert libc.reboot(0x1234567) == 0",
        "set the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
        "change the host's name": "import socket; socket.sethostname('x')",
        "personality": C + "assert libc.personality(0x0040000) >= 0",
        "32-bit calls": C + "assert libc.syscall(0x40000000 + 39) > 0",
    }
    network = {
        "a socket": "import socket; socket.socket()",
        "a Unix socket": "import socket; socket.socket(socket.AF_UNIX)",
        "an abstract socket": "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0x')",
        "a raw socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        "netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "write to a FIFO of the host": f"import os; os.write(os.open({str(fifo)!r}, os.O_WRONLY | os.O_NONBLOCK), b'x')",
        "read a FIFO of the host": f"import os; print(os.read(os.open({str(fifo)!r}, os.O_RDONLY | os.O_NONBLOCK), 100))",
        "a Unix socket of the host": f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(stream)!r}); s.send(b'x')",
        "a datagram from a pair of sockets": (
            f"import socket; a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', {str(datagram)!r})"
        ),
        "a pair of sockets connected anew": (
            f"import socket; a, b = socket.socketpair(); a.connect({str(stream)!r}); a.send(b'x')"
        ),
        "vsock": "import socket; socket.socket(socket.AF_VSOCK)",
        "loopback": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:22')",
        "name lookup": "import socket; socket.create_connection(('localhost', 80))",
        "shared memory": C + "assert libc.shmget(1234, 4096, 0o1666) >= 0",
        "message queue": C + "assert libc.msgget(1234, 0o1666) >= 0",
    }
    everything = {
        "fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        "thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
        "fork and wait": "import os, time\nfor _ in range(1000):\n  if os.fork() == 0: time.sleep(99)\n",
        "memory": "a = []\nwhile True: a.append(bytearray(1 << 24))",
        "memory in many": "import os\nfor _ in range(20):\n  if os.fork() == 0:\n    a = bytearray(300 << 20)\n    while True: pass\nwhile True: pass",
        "one huge list": "a = [0] * (1 << 40)",
        "disk": "f = open('/tmp/x', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
        "disk by many files": "i = 0\nwhile True:\n  open(f'/tmp/{i}', 'wb').write(b'x' * (1 << 20)); i += 1",
        "many inodes": "i = 0\nwhile True:\n  open(f'/tmp/{i}', 'w'); i += 1",
        "shared memory files": "i = 0\nwhile True:\n  open(f'/dev/shm/{i}', 'wb').write(b'x' * (1 << 20)); i += 1",
        "memory files": C + "import os\nwhile True: os.write(os.memfd_create('x'), b'x' * (1 << 20))",
        "output": "while True: print('x' * 10000)",
        "errors": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
        "a line without end": "import sys\nwhile True: sys.stdout.write('x'); sys.stdout.flush()",
        "descriptors": "f = []\nwhile True: f.append(open('/dev/null'))",
        "spin": "while True: pass",
        "sleep": "import time; time.sleep(1000)",
        "C spin": "x = 10 ** 10 ** 8",
        "regular expression": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
        "recursion": "import sys; sys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()",
        "big dump": "import os; os.abort()",
    }
    stay = {
        "a daemon": "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(1000)\n  os._exit(0)",
        "a daemon that closes all": "import os, time\nif os.fork() == 0:\n  os.setsid(); os.closerange(0, 100); time.sleep(1000)",
        "deaf to signals": "import signal, time\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError): pass\ntime.sleep(1000)",
        "kill the parent": f"import os; os.kill({pid}, 9)",
        "kill everybody": "import os; os.kill(-1, 9)",
        "kill init": "import os; os.kill(1, 9)",
        "stop the parent": f"import os, signal; os.kill({pid}, signal.SIGSTOP)",
        "priority": "import os; os.nice(-20)\nwhile True: pass",
        "a program in the background": "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)",
    }
    cheat = {
        "exit well": "import sys; sys.exit(0)",
        "leave at once": "import os; os._exit(0)",
        "print success": "print('passed'); print('OK'); print('1.0'); print('True')",
        "equal to all": "class E:\n  def __eq__(self, o): return True\n  def __ne__(self, o): return False\ndef answer(): return E()",
        "an int that equals all": "class E(int):\n  def __eq__(self, o): return True\n  def __hash__(self): return 1\ndef answer(): return E(1)",
        "a str that equals all": "class E(str):\n  def __eq__(self, o): return True\ndef answer(): return E('x')",
        "a lying repr": "class E:\n  def __repr__(self): return '\"x\"'\ndef answer(): return E()",
        "write to the answers": "import os\nfor i in range(3, 100):\n  try: os.write(i, b'{\"value\": true}\\n' * 50)\n  except OSError: pass",
        "answer by hand": 'import os\nfor i in range(3, 100):\n  try: os.write(i, b\'started\\n{"value": {"pass": 1}}\\n\')\n  except OSError: pass\nos._exit(0)',
        "patch json": "import json; json.dumps = lambda *a, **k: '{\"value\": true}'\ndef answer(): return 1",
        "patch eval": "import builtins; builtins.eval = lambda *a, **k: True\ndef answer(): return 1",
        "patch compile": "import builtins; builtins.compile = lambda *a, **k: 'True'\ndef answer(): return 1",
        "look for the expected value": (
            "import gc, sys\nfor o in gc.get_objects():\n  try:\n    if isinstance(o, (dict, list)): print(repr(o)[:2000])\n"
            "  except Exception: pass"
        ),
        "look up the stack": "import sys\nf = sys._getframe()\nwhile f:\n  print(f.f_locals.keys(), f.f_locals.get('task')); f = f.f_back",
        "read the checker": "print(open('/driver.py').read())",
        "read stdin as the answer": "import sys; print(sys.stdin.read())",
        "answer deep": "def answer():\n  x = []\n  for _ in range(100000): x = [x]\n  return x",
        "answer long": "def answer(): return 'x' * (1 << 26)",
        "wait for a change of the checker": "import os, time\nfor _ in range(100):\n  try: os.rename('/driver.py', '/tmp/d'); os.symlink('/tmp/e', '/driver.py')\n  except OSError: time.sleep(0.001)",
    }
    return {
        "read": read,
        "write": write,
        "kernel": kernel,
        "network": network,
        "everything": everything,
        "stay": stay,
        "cheat": cheat,
    }
