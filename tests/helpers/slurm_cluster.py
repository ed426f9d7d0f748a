"""A whole Slurm on this machine, for a test: munged, slurmctld and slurmd with a configuration, a key and ports of their own."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from upped import wait_until

PARTS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
CONF = """
ClusterName=atoll
SlurmctldHost={host}
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=20
MinJobAge=600
SchedulerParameters=sched_interval=1,defer
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing_parts() -> list[str]:
    return [name for name in PARTS if _program(name) is None]


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[None]:
    """While it lasts, this process and its children submit there."""
    folder.mkdir(mode=0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, user=getpass.getuser(), folder=folder, controller=free_port(), daemon=free_port()))
    munged = (
        "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", f"--pid-file={folder}/m.pid",
        f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"SLURM_CONF": str(conf)}))
        for words in (munged, ("slurmctld", "-D", "-f", str(conf)), ("slurmd", "-D", "-f", str(conf), "-N", host)):
            stack.enter_context(_daemon(words, folder))
            if words is munged:
                wait_until((folder / "munge.socket").exists, "munge's socket", 20.0)
        wait_until(lambda: "idle" in _printed("sinfo", "--noheader", "--format=%T"), f"an idle node; see {folder}", 60.0)
        yield
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], check=False)
        wait_until(lambda: not _printed("squeue", "--noheader").strip(), "an empty queue", 60.0)


@contextmanager
def _daemon(words: tuple[str, ...], folder: Path) -> Iterator[None]:
    program = _program(words[0])
    assert program is not None
    with (folder / f"{words[0]}.out").open("wb") as out:
        child = subprocess.Popen([program, *words[1:]], stdout=out, stderr=out)
        try:
            yield
        finally:
            child.terminate()
            try:
                child.wait(20.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _printed(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout
