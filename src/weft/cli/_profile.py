"""`weft profile`."""

from __future__ import annotations

from pathlib import Path


def profile(run: Path, /, *, ranks: str = "suspects", steps: int = 3) -> None:
    """Profile some steps of a training that runs.

    Ranks run torch.profiler for their next steps, and go on. Printed is what each operator took; the traces stay in the
    run's folder.

    Parameters
    ----------
    run
        Folder of the run.
    ranks
        `suspects`, which are those that hold the run back and one healthy rank beside them; `all`; or numbers such as
        0,3.
    steps
        Steps to profile, 1 to 100.
    """
    from weft.watch.profile_run import profile_run, ranks_to_profile
    from weft.watch.profiles import profile_lines
    from weft.watch.run_record import RunRecord

    record = RunRecord(run)
    try:
        chosen = ranks_to_profile(record, ranks)
        named = ", ".join(map(str, chosen.ranks))
        print(
            f"profile   {steps} steps of rank{'s' if len(chosen.ranks) > 1 else ''} {named} ({chosen.why})", flush=True
        )
        found = profile_run(record, chosen.ranks, steps)
    finally:
        record.close()
    missing = sorted(set(chosen.ranks) - {each.rank for each in found})
    if missing:
        print(f"note      nothing came from rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}")
    print("\n".join(profile_lines(found)))
