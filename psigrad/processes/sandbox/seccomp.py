"""A seccomp filter as the kernel reads it: system calls that no honest program of ours needs fail with EPERM.

It comes on top of namespaces and dropped capabilities: the kernel's less-trodden interfaces are where escapes were found.
Format: struct sock_filter of linux/filter.h, 8 bytes an instruction (man 2 seccomp).
"""

from __future__ import annotations

import platform
import struct

# name: (x86_64, aarch64); None where the architecture has no such call
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "clone3": (435, 435),
    "socket": (41, 198),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "personality": (135, 92),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "vmsplice": (278, 75),
    "move_pages": (279, 239),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "set_mempolicy": (238, 237),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "vhangup": (153, 58),
    "fanotify_init": (300, 262),
    "msgget": (68, 186),
    "semget": (64, 190),
    "shmget": (29, 194),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, None),
}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}  # column, AUDIT_ARCH, clone
_X32 = 0x40000000
_NAMESPACES = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_LOAD, _EQUAL, _GREATER, _ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def program() -> bytes | None:
    """The filter for this machine, or None on an architecture that is not known here."""
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        return None
    column, arch, clone = known
    lines = [
        _line(_LOAD, _ARCH),
        _line(_EQUAL, arch, 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
    ]
    if column == 0:
        lines += [_line(_GREATER, _X32, 0, 1), _line(_RETURN, _KILL)]
    for name, numbers in _DENIED.items():
        number = numbers[column]
        if number is not None:
            # without clone3 the C library takes clone, whose flags a filter can read
            lines += [_line(_EQUAL, number, 0, 1), _line(_RETURN, _ENOSYS if name == "clone3" else _EPERM)]
    lines += [
        _line(_EQUAL, clone, 0, 3),
        _line(_LOAD, _FIRST_ARGUMENT),
        _line(_ANY, _NAMESPACES, 0, 1),
        _line(_RETURN, _EPERM),
        _line(_RETURN, _ALLOW),
    ]
    return b"".join(lines)


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
