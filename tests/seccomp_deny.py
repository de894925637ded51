"""Run a command under a seccomp filter that refuses some NUMA system calls, as container runtimes do.

Usage: python tests/seccomp_deny.py mbind,set_mempolicy COMMAND [ARGUMENT...]
"""

import ctypes
import errno
import os
import struct
import sys

from placement.numa import syscall_number

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER_MODE = 22, 38, 2
_LOAD_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def refuse(calls: list[str], code: int = errno.EPERM) -> None:
    """Refuse `calls` with errno `code` in this process and all that it starts, for good. See seccomp(2)."""
    numbers = [syscall_number(call) for call in calls]
    program = [(_LOAD_NUMBER, 0, 0, 0)]
    for position, number in enumerate(numbers):
        program.append((_JUMP_IF_EQUAL, len(numbers) - position, 0, number))
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | code)]
    code_bytes = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    instructions = ctypes.create_string_buffer(code_bytes, len(code_bytes))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _FILTER_MODE, header, 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse(sys.argv[1].split(","))
    os.execvp(sys.argv[2], sys.argv[2:])
