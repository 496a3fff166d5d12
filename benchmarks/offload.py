"""What it costs to keep masters and optimizer states on a disk, beside keeping them and beside the disk alone.

The limit is the disk's own: the same bytes read and written in the same pieces by a program that does nothing else, in
the same run.  What a step takes longer cannot be less than what of that does not hide behind its computation.  No
update may begin before the whole gradient's norm is known, so what can hide is what the buffers hold: the last groups'
writes, behind the next forward, and everything behind the update itself.  Both sides go past the page cache where the
file system can, which is said: through it, the figures would be those of memory.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks._contender import Entry, contenders, interleave
from benchmarks._options import options_parser
from benchmarks._results import ROOT, Goal, log, machine, versions, write_result
from benchmarks._statistics import spread
from weft.config.plan import ComputePlan, MemoryPlan, MicrobatchPlan, Plan, dump_plan
from weft.techniques.offload.storage import FileStorage, new_buffer

SHAPE: dict[str, Any] = {
    "num_layers": 6, "hidden_size": 512, "ffn_size": 2048, "vocabulary_size": 8192, "sequence_length": 64, "batch": 2,
}  # fmt: skip
LONGER = {"sequence_length": 256, "batch": 8}
"""A batch as one trains with: 2,048 tokens per step instead of 128."""
_PIECE_BYTES = 32 << 20
_CPU = torch.device("cpu")


def plan(folder: str | None, batch: int = SHAPE["batch"]) -> Plan:
    """bf16 with AdamW: twelve bytes of masters and moments per parameter leave."""
    memory = (
        MemoryPlan() if folder is None else MemoryPlan(offload="optimizer", offload_to="disk", offload_folder=folder)
    )
    return Plan(
        memory=memory,
        microbatch=MicrobatchPlan(size=batch, per_step=1),
        compute=ComputePlan(device="cpu", precision="bf16"),
    )


def disk_seconds(folder: Path, num_bytes: int) -> tuple[float, bool]:
    """Seconds to read and write so many bytes in pieces, and whether that was past the page cache."""
    storage, buffer = FileStorage(num_bytes, folder, _CPU), new_buffer(_PIECE_BYTES, _CPU)
    starts = range(0, num_bytes - _PIECE_BYTES + 1, _PIECE_BYTES)
    for start in starts:
        storage.write(start, buffer)
    began = time.perf_counter()
    for start in starts:
        storage.read(start, buffer)
        storage.write(start, buffer)
    seconds = (time.perf_counter() - began) * num_bytes / (len(starts) * _PIECE_BYTES)
    is_direct = storage.is_direct
    storage.close()
    return seconds, is_direct


def entries_of(folder: str) -> list[Entry]:
    """Short and longer steps, each with states kept and in a folder."""
    return [
        Entry(
            name=name,
            target="benchmarks._weft:weft",
            settings={**shape, "plan": dump_plan(plan(where, shape["batch"]), everything=True)},
            ranks=1,
        )
        for name, where, shape in (
            ("kept", None, SHAPE),
            ("on disk", folder, SHAPE),
            ("kept, longer", None, SHAPE | LONGER),
            ("on disk, longer", folder, SHAPE | LONGER),
        )
    ]


def main() -> None:
    parser = options_parser(__doc__, rounds=5)
    parser.add_argument("--on", type=Path, default=ROOT / "build", help="a folder on the disk")
    options = parser.parse_args()
    before = machine()
    options.on.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.on) as folder:
        entries = entries_of(folder)
        with contenders(entries, warmup_steps=2) as alive:
            blocks = interleave(alive, rounds=options.rounds, steps=2)
        seconds = {name: [median(block.seconds) for block in found] for name, found in blocks.items()}
        peaks = {name: max(block.peak_bytes for block in found) for name, found in blocks.items()}
        kept_bytes = 12 * parameters()
        alone = [disk_seconds(Path(folder), kept_bytes) for _ in range(options.rounds)]
    added = [away - kept for away, kept in zip(seconds["on disk"], seconds["kept"], strict=True)]
    limit = median(each for each, _ in alone)
    ratios = [each / limit for each in added]
    pairs = list(zip(seconds["on disk, longer"], seconds["kept, longer"], strict=True))
    longer = [away / kept for away, kept in pairs]
    bound = 1.0 + limit / median(seconds["kept, longer"])
    log(f"longer steps: {median(longer):.2f} times as long on a disk; {bound:.2f} if nothing of the disk's time hid")
    cache = "past the page cache, which plays no part" if alone[0][1] else "through the page cache: figures of memory"
    log(f"the disk: {2 * kept_bytes / limit / 1e9:.2f} GB/s, reads and writes together, {cache}")
    hidden = [1.0 - (away - kept) / limit for away, kept in pairs]
    log(f"hidden of the disk's time in longer steps: {median(hidden):.0%} (quartiles {spread(hidden)})")
    log(f"added {median(added):.3f} s per step; the disk alone {limit:.3f} s for {kept_bytes / 1e6:.0f} MB")
    goals = [
        Goal(
            what="time that states on a disk add to a step, over the disk's own",
            measured=median(ratios),
            goal=1.1,
            better="lower",
            spread=spread(ratios),
            unit="x",
        ),
        Goal(
            what=f"a step of 2,048 tokens with states on a disk, over one without; bound {bound:.2f} if nothing hid",
            measured=median(longer),
            goal=1.3,
            better="lower",
            spread=spread(longer),
            unit="x",
        ),
    ]
    samples = {"seconds": seconds, "disk_seconds": [each for each, _ in alone], "peak_bytes": peaks}
    about = {
        "machine": before,
        "versions": versions(),
        "settings": {**SHAPE, "longer": LONGER, "kept_bytes": kept_bytes, "direct": alone[0][1], "bound": bound},
        "note": options.note,
    }
    write_result("offload", goals=goals, samples=samples, about=about, folder=options.folder)


def parameters() -> int:
    from benchmarks._llama import shape_of
    from weft.model.reference.decoder import build_decoder

    return sum(parameter.numel() for parameter in build_decoder(shape_of(SHAPE)).module.parameters())


if __name__ == "__main__":
    main()
