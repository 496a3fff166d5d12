"""`weft doctor`."""

from __future__ import annotations

import json as to_text
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli._options import Json

if TYPE_CHECKING:
    from weft.watch.doctor import MachineCheck

WRONG_STATUS = 1


def doctor(*, cluster: str | None = None, json: Json = False) -> int:
    """Look at this machine, and say what to change before a job runs on it.

    Cores, memory, shared memory, devices, versions, sockets, open files, clocks and disks are looked at; it takes about
    a second. Status 0: nothing is to change; 1: something is.

    Parameters
    ----------
    cluster
        TOML file, or a spec such as 4x8xh100: it is compared with this machine, and its peaks and links with the table
        of devices.
    """
    from weft.config.cluster import Cluster, resolve_cluster
    from weft.watch.doctor import check_cluster, check_machine

    described = None if cluster is None else resolve_cluster(cluster)
    checks = check_machine(Path("runs"))
    if described is not None:
        checks += check_cluster(described, Cluster.detect())
    if json:
        print(to_text.dumps([check.document() for check in checks], indent=2, ensure_ascii=False))
    else:
        _print(checks)
    return WRONG_STATUS if any(check.state == "change" for check in checks) else 0


def _print(checks: list[MachineCheck]) -> None:
    import textwrap

    width = max(len(check.what) for check in checks)
    for check in checks:
        print(f"{check.state:<6}  {check.what:<{width}}  {check.value}")
        if check.change:
            indent = " " * (8 + width + 2)
            print(textwrap.fill(check.change, 120, initial_indent=f"{indent}→ ", subsequent_indent=f"{indent}  "))
    num = sum(check.state == "change" for check in checks)
    print("\nNothing is to change." if not num else f"\n{num} to change.")
