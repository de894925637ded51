import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_host import write

from placement import numa, permissions
from placement.permissions import explain_refusal, probe_permissions, refused_by

DENY = Path(__file__).resolve().parents[2] / "seccomp_deny.py"
CALLS = ["sched_setaffinity", "set_mempolicy", "mbind", "get_mempolicy", "move_pages", "migrate_pages"]


def status_of(tmp_path, seccomp=0, capabilities=0, mems="0"):
    write(
        tmp_path / "self/status",
        f"Name:\tx\nCapEff:\t{capabilities:016x}\nSeccomp:\t{seccomp}\nMems_allowed_list:\t{mems}",
    )
    return tmp_path


def test_probing_leaves_policy_and_affinity_as_they_were():
    before = numa.get_mempolicy(), os.sched_getaffinity(0)
    found = probe_permissions()
    assert [permission.call for permission in found.calls] == CALLS
    assert (numa.get_mempolicy(), os.sched_getaffinity(0)) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize("call", numa.CALLS)
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_a_refused_call_alone_is_reported_refused(call, code):
    others = {permission.call for permission in probe_permissions().refused} - {call}
    with numa.refusing(**{call: code}):
        found = probe_permissions()
    assert {refused.call for refused in found.refused} == others | {call}
    assert found.of(call).refused.code == code
    assert errno.errorcode[code] in str(found.of(call).refused)


def test_reading_the_policy_is_not_permission_to_set_it():
    with numa.refusing(set_mempolicy=errno.EPERM):
        found = probe_permissions()
    assert found.of("get_mempolicy").permitted
    assert not found.of("set_mempolicy").permitted


def test_a_filter_that_kills_the_caller_is_a_refusal(monkeypatch):
    def killed():
        os.kill(os.getpid(), signal.SIGSYS)

    monkeypatch.setitem(permissions._PROBES, "mbind", killed)
    found = probe_permissions()
    assert "SIGSYS" in found.of("mbind").refused.reason
    assert found.of("move_pages").permitted


def test_an_error_in_a_probe_never_escapes_into_the_caller(monkeypatch):
    monkeypatch.setitem(permissions._PROBES, "mbind", lambda: 1 / 0)
    assert not probe_permissions().of("mbind").permitted


@pytest.mark.parametrize(
    ("seccomp", "capabilities", "code", "reason", "remedy"),
    [
        (
            2,
            0,
            errno.EPERM,
            "seccomp filter is active and the process lacks CAP_SYS_NICE",
            "--cap-add SYS_NICE",
        ),
        (0, 0, errno.EPERM, "lacks CAP_SYS_NICE", "CAP_SYS_NICE"),
        (2, 1 << 23, errno.EPERM, "seccomp filter is active", "seccomp profile that allows mbind"),
        (0, 1 << 23, errno.EPERM, "security module or an outer sandbox", "allow mbind there"),
        (2, 0, errno.ENOSYS, "seccomp profile hides the call", "CONFIG_NUMA"),
        (0, 0, errno.ENOSYS, "no NUMA support", "CONFIG_NUMA"),
        (0, 0, errno.EINVAL, "outside Mems_allowed (0)", "cpuset.mems"),
        (0, 0, errno.EIO, os.strerror(errno.EIO), "manual page"),
    ],
)
def test_reason_and_remedy(tmp_path, seccomp, capabilities, code, reason, remedy):
    refused = explain_refusal("mbind", code, status_of(tmp_path, seccomp, capabilities))
    assert reason in refused.reason
    assert remedy in refused.remedy
    assert str(refused).startswith("mbind refused (")


def test_refused_by_takes_the_name_from_the_exception():
    assert refused_by(numa.NumaCallError("migrate_pages", errno.EPERM)).call == "migrate_pages"
    assert refused_by(PermissionError(errno.EPERM, "no"), "sched_setaffinity").call == "sched_setaffinity"


def test_a_real_seccomp_filter_is_found_and_named():
    script = "from placement.permissions import probe_permissions\nfor item in probe_permissions().refused: print(item)"
    command = [sys.executable, str(DENY), "mbind,migrate_pages", sys.executable, "-c", script]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["mbind", "migrate_pages"]
    assert all("EPERM: a seccomp filter is active" in line and "CAP_SYS_NICE" in line for line in lines)
