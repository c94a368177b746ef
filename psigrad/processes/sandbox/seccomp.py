"""A seccomp filter in the kernel's format: system calls of ordinary Python programs pass, all others fail with EPERM.

The filter complements namespaces and dropped capabilities, since past escapes used the kernel's less common interfaces. The only
sockets that a program can make are connected pairs of streams. Datagram pairs are forbidden, since such a socket could still send
to any path. Format: struct sock_filter of linux/filter.h, 8 bytes an instruction (man 2 seccomp).
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable, Iterator

# name:x86_64:aarch64; - if the architecture has no such call
_ALLOWED = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62 mmap:9:222 mprotect:10:226
munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 pread64:17:67 pwrite64:18:68
readv:19:65 writev:20:66 access:21:- pipe:22:- select:23:- sched_yield:24:124 mremap:25:216 msync:26:227 mincore:27:232
madvise:28:233 dup:32:23 dup2:33:- pause:34:- nanosleep:35:101 getitimer:36:102 alarm:37:- setitimer:38:103 getpid:39:172
sendfile:40:71 sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 shutdown:48:210 getsockname:51:204
getpeername:52:205 setsockopt:54:208 getsockopt:55:209 fork:57:- vfork:58:- execve:59:221 exit:60:93 wait4:61:260
kill:62:129 uname:63:160 fcntl:72:25 flock:73:32 fsync:74:82 fdatasync:75:83 truncate:76:45 ftruncate:77:46 getdents:78:-
getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- mkdir:83:- rmdir:84:- creat:85:- link:86:- unlink:87:- symlink:88:-
readlink:89:- chmod:90:- fchmod:91:52 chown:92:- fchown:93:55 lchown:94:- umask:95:166 gettimeofday:96:169 getrlimit:97:163
getrusage:98:165 sysinfo:99:179 times:100:153 getuid:102:174 getgid:104:176 geteuid:107:175 getegid:108:177 setpgid:109:154
getppid:110:173 getpgrp:111:- setsid:112:157 getgroups:115:158 getresuid:118:148 getresgid:120:150 getpgid:121:155
getsid:124:156 capget:125:90 rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigqueueinfo:129:138 rt_sigsuspend:130:133
sigaltstack:131:132 utime:132:- mknod:133:- statfs:137:43 fstatfs:138:44 getpriority:140:141 setpriority:141:140
sched_setparam:142:118 sched_getparam:143:121 sched_setscheduler:144:119 sched_getscheduler:145:120
sched_get_priority_max:146:125 sched_get_priority_min:147:126 sched_rr_get_interval:148:127 mlock:149:228 munlock:150:229
mlockall:151:230 munlockall:152:231 prctl:157:167 arch_prctl:158:- setrlimit:160:164 sync:162:81 gettid:186:178
readahead:187:213 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13
tkill:200:130 time:201:- futex:202:98 sched_setaffinity:203:122 sched_getaffinity:204:123 epoll_create:213:-
getdents64:217:61 set_tid_address:218:96 restart_syscall:219:128 fadvise64:221:223 timer_create:222:107
timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111 clock_gettime:228:113
clock_getres:229:114 clock_nanosleep:230:115 exit_group:231:94 epoll_wait:232:- epoll_ctl:233:21 tgkill:234:131 utimes:235:-
waitid:247:95 inotify_init:253:- inotify_add_watch:254:27 inotify_rm_watch:255:28 openat:257:56 mkdirat:258:34
mknodat:259:33 fchownat:260:54 futimesat:261:- newfstatat:262:79 unlinkat:263:35 renameat:264:38 linkat:265:37
symlinkat:266:36 readlinkat:267:78 fchmodat:268:53 faccessat:269:48 pselect6:270:72 ppoll:271:73 set_robust_list:273:99
get_robust_list:274:100 splice:275:76 tee:276:77 sync_file_range:277:84 utimensat:280:88 epoll_pwait:281:22 signalfd:282:-
timerfd_create:283:85 eventfd:284:- fallocate:285:47 timerfd_settime:286:86 timerfd_gettime:287:87 signalfd4:289:74
eventfd2:290:19 epoll_create1:291:20 dup3:292:24 pipe2:293:59 inotify_init1:294:26 preadv:295:69 pwritev:296:70
rt_tgsigqueueinfo:297:240 recvmmsg:299:243 prlimit64:302:261 syncfs:306:267 sendmmsg:307:269 getcpu:309:168
getrandom:318:278 membarrier:324:283 mlock2:325:284 copy_file_range:326:285 preadv2:327:286 pwritev2:328:287 statx:332:291
rseq:334:293 close_range:436:436 openat2:437:437 faccessat2:439:439 epoll_pwait2:441:441 execveat:322:281 pidfd_open:434:434
pidfd_send_signal:424:424 futex_waitv:449:449 setresuid:117:147 setresgid:119:149 setuid:105:146 setgid:106:144
setgroups:116:159 setreuid:113:145 setregid:114:143 ioctl:16:29 ioprio_get:252:31 get_mempolicy:239:236
sched_getattr:315:275 fchmodat2:452:452 capset:126:91
"""
# for programs that may use sockets in their network namespace, which has no other members
_SOCKETS = "connect:42:203 accept:43:202 bind:49:200 listen:50:201 accept4:288:242"
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: others, such as AF_VSOCK, ignore namespaces
# column, AUDIT_ARCH, and the numbers of clone, clone3, socketpair and socket
_ARCHITECTURES = {"x86_64": (1, 0xC000003E, 56, 435, 53, 41), "aarch64": (2, 0xC00000B7, 220, 435, 199, 198)}
_X32 = 0x40000000
_NAMESPACES = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_STREAM, _KIND = 1, 0xF
_LOAD, _EQUAL, _GREATER, _AT_LEAST, _ANY, _AND, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def program(sockets: bool = False) -> bytes | None:
    """Return the filter for this machine, or None on an unknown architecture. With `sockets`, stream sockets are allowed."""
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        return None
    column, arch, clone, clone3, socketpair, socket = known
    calls = _ALLOWED + (_SOCKETS if sockets else "")
    numbers = [int(number) for call in calls.split() if (number := call.split(":")[column]) != "-"]
    lines = [_line(_LOAD, _ARCH), _line(_EQUAL, arch, 1, 0), _line(_RETURN, _KILL), _line(_LOAD, _NUMBER)]
    if column == 1:
        lines += [_line(_AT_LEAST, _X32, 0, 1), _line(_RETURN, _KILL)]
    # without clone3 the C library uses clone, whose flags a filter can read
    lines += [_line(_EQUAL, clone3, 0, 1), _line(_RETURN, _ENOSYS), _line(_EQUAL, clone, 0, 4), _line(_LOAD, _FIRST_ARGUMENT)]
    lines += [_line(_ANY, _NAMESPACES, 0, 1), _line(_RETURN, _EPERM), _line(_RETURN, _ALLOW)]
    lines += [_line(_EQUAL, socketpair, 0, 5), _line(_LOAD, _SECOND_ARGUMENT), _line(_AND, _KIND)]
    lines += [_line(_EQUAL, _STREAM, 1, 0), _line(_RETURN, _EPERM), _line(_RETURN, _ALLOW)]
    if sockets:
        lines += [_line(_EQUAL, socket, 0, len(_FAMILIES) + 3), _line(_LOAD, _FIRST_ARGUMENT)]
        lines += [_line(_EQUAL, family, len(_FAMILIES) - i, 0) for i, family in enumerate(_FAMILIES)]
        lines += [_line(_RETURN, _EPERM), _line(_RETURN, _ALLOW)]
    for first, last in _runs(numbers):
        lines += [_line(_GREATER, last, 2, 0), _line(_AT_LEAST, first, 0, 1), _line(_RETURN, _ALLOW)]
    # system calls newer than this list fail with ENOSYS, so that the C library uses its fallback
    return b"".join([*lines, _line(_GREATER, max(numbers), 0, 1), _line(_RETURN, _ENOSYS), _line(_RETURN, _EPERM)])


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each run of consecutive numbers."""
    first = last = -2
    for number in sorted(numbers):
        if number != last + 1:
            if last >= 0:
                yield first, last
            first = number
        last = number
    yield first, last


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
