"""Draws a program by its seed: a module, a loss, an optimizer and a loop as a user writes them, as text.

A third of the programs have nothing strange; the others one thing or two, of `parts`.
`python tests/battery/battery_programs.py SEED` prints one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from battery_parts import Part, read_parts

STRANGE = read_parts()
"""All that a program may have of what is strange."""
ALONE = 10_000
"""From this seed on a program has one strange thing, each in its turn."""
BY_NAME = {part.name: part for part in STRANGE}


@dataclass(frozen=True)
class Program:
    """A drawn program, which `battery_runs` plays."""

    seed: int
    strange: tuple[str, ...]
    """Names of its parts; none: it is healthy."""
    kinds: tuple[str, ...]
    draws: bool
    """Plain PyTorch draws other numbers: compared is Weft on one process."""
    dtype: str
    tolerance: float
    """Of weights, where the dtype's own is too narrow; else 0."""
    has_tables: bool
    text: str

    @property
    def title(self) -> str:
        return " + ".join(self.strange) or "healthy"


OPTIMIZERS = (
    "torch.optim.SGD(groups, lr=0.1)",
    "torch.optim.SGD(groups, lr=0.05, momentum=0.9)",
    "torch.optim.SGD(groups, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.02)",
    "torch.optim.SGD(groups, lr=0.05, momentum=0.8, dampening=0.3)",
    "torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)",
    "torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, weight_decay=0.1, foreach=True)",
    "torch.optim.Adam(groups, lr=1e-2, eps=1e-3, amsgrad=True)",
    "torch.optim.Adam(groups, lr=1e-2, eps=1e-3, weight_decay=0.05)",
    "torch.optim.RMSprop(groups, lr=5e-3, eps=1e-3)",
    "torch.optim.RMSprop(groups, lr=5e-3, eps=1e-3, momentum=0.5, centered=True)",
    "torch.optim.Adamax(groups, lr=1e-2, eps=1e-3)",
    "torch.optim.NAdam(groups, lr=5e-3, eps=1e-3)",
    "torch.optim.RAdam(groups, lr=5e-3, eps=1e-3)",
    "torch.optim.Adadelta(groups, lr=0.5, eps=1e-3)",
    "torch.optim.Adam(groups, lr=1e-2, eps=1e-3, fused=True)",
)
"""Healthy ones.  `eps` is large: a gradient that is 0 but for rounding must not become a step of ±lr."""
BLOCKS = {
    "plain": ("", "x + self.down({act}(self.up(x)))"),
    "no residual": ("", "self.down({act}(self.up(x)))"),
    "norm before": ("self.norm = nn.LayerNorm(W)", "x + self.down({act}(self.up(self.norm(x))))"),
    "norm after": ("self.norm = nn.LayerNorm(W)", "self.norm(x + self.down({act}(self.up(x))))"),
    "root mean square": ("self.norm = nn.RMSNorm(W)", "x + self.down({act}(self.up(self.norm(x))))"),
    "scaled": ("self.gain = nn.Parameter(torch.full((W,), 0.5))", "x + self.gain * self.down({act}(self.up(x)))"),
}
ACTS = ("torch.tanh", "F.gelu", "F.silu", "F.softplus", "torch.sin")
ATTENTION = """
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, W // 2).permute(2, 0, 3, 1, 4)
        x = x + self.out((q @ k.transpose(-1, -2) / W**0.5).softmax(-1).matmul(v).transpose(1, 2).reshape(x.shape))"""
ERRORS = (
    'F.cross_entropy(logits, y, reduction="none")',
    'F.cross_entropy(logits, y, reduction="none", label_smoothing=0.1)',
    "(logits - x[:, :4]).square().mean(1)",
    'F.binary_cross_entropy_with_logits(logits, (x[:, :4] > 0).to(logits.dtype), reduction="none").sum(1)',
    'F.huber_loss(logits, x[:, :4], reduction="none").sum(1)',
    "(logits.logsumexp(1) - logits.gather(1, y[:, None])[:, 0]) * (1 + x[:, 0].square())",
)


class _Drawn:
    """One program on its way."""

    def __init__(self, seed: int, strange: Sequence[Part]) -> None:
        self.draw = random.Random(seed)
        self.seed, self.strange = seed, tuple(strange)
        skeletons = ("rows", "rows", "rows", "tokens", "attention", "images")
        named = [part.skeleton for part in strange if part.skeleton]
        self.skeleton = self.draw.choice(named or skeletons)
        self.batch = next((part.batch for part in strange if part.batch), "")
        self.form = self.batch or self.draw.choice(("list", "list", "dict"))
        self.has_tables = self.draw.random() < 0.6
        self.num_blocks = self.draw.choice((2, 2, 3))
        self.bodies = [part for part in strange if part.body]
        self.places = [self._place() for _ in self.bodies]

    def _place(self) -> str:
        if self.skeleton != "rows":
            return self.draw.choice(("late", "late", "inline late"))
        return self.draw.choice(("early", "late", "blocks", "blocks", "first block", "inline"))

    def text(self) -> str:
        defined = dict.fromkeys(part.define for part in self.strange if part.define)
        own = "\n\n\n".join(filter(None, (*defined, *self._classes())))
        pieces = (self._head(), own, self._net(), self._build(), self._loss(), self._optimizer(), self._loop())
        return "\n\n\n".join(pieces) + "\n"

    def _head(self) -> str:
        title = " + ".join(part.name for part in self.strange) or "healthy"
        dtype = next((part.dtype for part in self.strange if part.dtype), "float64")
        return (
            f'"""Seed {self.seed}: {title}."""\n\nfrom battery_kit import *\n\nDTYPE = torch.{dtype}\nW = 16\n'
            f'FORM = "{self.form}"\nSKELETON = "{self.skeleton}"\n'
            f"CUT = {self._cut()}\nSPLIT = {self._split()}"
        )

    def _cut(self) -> str:
        early = [f'"odd{n}"' for n, place in enumerate(self.places) if place == "early"]
        late = [f'"odd{n}"' for n, place in enumerate(self.places) if place == "late"]
        blocks = ", ".join(f'"blocks.{n}"' for n in range(self.num_blocks))
        pool = ['"pool"'] if self.skeleton in ("tokens", "attention") else []
        tail = ", ".join((*pool, *late, '"head"'))
        skips = f"stem_skip=({', '.join(early)},), " if early else ""
        return f'dict(entry="stem", {skips}blocks=({blocks}), tail=({tail},))' if self.has_tables else "None"

    def _split(self) -> str:
        return '{"blocks.*.up": "column", "blocks.*.down": "row"}' if self.has_tables else "{}"

    def _classes(self) -> list[str]:
        made = []
        for number, (part, place) in enumerate(zip(self.bodies, self.places, strict=True)):
            if place.startswith("inline"):
                continue
            init = _indented(part.init or "pass", 8)
            body = _indented(part.body, 8)
            made.append(
                f"class Odd{number}(nn.Module):\n    def __init__(self):\n        super().__init__()\n{init}\n\n"
                f"    def forward(self, x):\n{body}"
            )
        return made

    def _net(self) -> str:
        style = self.draw.choice(sorted(BLOCKS))
        init, out = BLOCKS[style]
        act = self.draw.choice(ACTS)
        bias = self.draw.choice(("", "", ", bias=False"))
        blocks: list[str] = []
        odd_init, odd_call = "", ""
        for number, place in enumerate(self.places):
            if place == "blocks":
                odd_init += f"        self.odd{number} = Odd{number}()\n"
                odd_call += f"        x = self.odd{number}(x)\n"
            elif place == "first block":
                odd_init += f"        self.odd{number} = Odd{number}() if number == 0 else nn.Identity()\n"
                odd_call += f"        x = self.odd{number}(x)\n"
        attends = self.skeleton == "attention"
        blocks.append("class Block(nn.Module):\n    def __init__(self, number):\n        super().__init__()")
        blocks.append(f"        self.up, self.down = nn.Linear(W, 2 * W{bias}), nn.Linear(2 * W, W)")
        if attends:
            blocks.append("        self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)")
        blocks += [f"        {init}"] if init else []
        blocks += [odd_init.rstrip("\n")] if odd_init else []
        blocks.append(f"\n    def forward(self, x):{ATTENTION if attends else ''}")
        blocks += [odd_call.rstrip("\n")] if odd_call else []
        blocks.append(f"        return {out.format(act=act)}")
        return "\n".join(blocks) + "\n\n\n" + self._whole()

    def _whole(self) -> str:
        stem = {
            "rows": "nn.Linear(6, W)",
            "tokens": "nn.Embedding(9, W)",
            "attention": "nn.Linear(3, W)",
            "images": "nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(108, W))",
        }[self.skeleton]
        bases = ", ".join((*(part.mixin for part in self.strange if part.mixin), "nn.Module"))
        lines = [f"class Net({bases}):", "    def __init__(self):", "        super().__init__()"]
        lines.append(f"        self.stem = {stem}")
        lines.append(f"        self.blocks = nn.ModuleList(Block(number) for number in range({self.num_blocks}))")
        if self.skeleton in ("tokens", "attention"):
            lines.append("        self.pool = Pool()")
        methods: list[str] = []
        early, late = [], []
        for number, (part, place) in enumerate(zip(self.bodies, self.places, strict=True)):
            if place in ("early", "late"):
                lines.append(f"        self.odd{number} = Odd{number}()")
                (early if place == "early" else late).append(f"        x = self.odd{number}(x)")
            elif place.startswith("inline"):
                lines += [_indented(part.init, 8)] if part.init else []
                methods.append(f"    def odd{number}(self, x):\n{_indented(part.body, 8)}\n")
                (late if place == "inline late" else early).append(f"        x = self.odd{number}(x)")
        lines.append("        self.head = nn.Linear(W, 4)\n")
        lines += methods
        outputs = next((part.outputs for part in self.strange if part.outputs), "logits")
        lines.append("    def forward(self, x):")
        if "given" in outputs:
            lines.append("        x = given = x.detach().requires_grad_(True)")
        lines += ["        x = self.stem(x)", *early, "        for block in self.blocks:", "            x = block(x)"]
        lines += ["        x = self.pool(x)"] if self.skeleton in ("tokens", "attention") else []
        lines += [*late, "        hidden = x", "        logits = self.head(hidden)", f"        return {outputs}"]
        return "\n".join(lines)

    def _build(self) -> str:
        lines = ["def build():", "    torch.manual_seed(5)", "    model = Net().to(DTYPE)"]
        lines += [_indented(part.after_build, 4) for part in self.strange if part.after_build]
        return "\n".join((*lines, "    return model"))

    def _loss(self) -> str:
        unpack = next((part.unpack or "outputs" for part in self.strange if part.outputs), "outputs, None")
        lines = ["def loss_for(model, own):", "    def loss_fn(outputs, batch):"]
        lines.append(f"        logits, hidden = {unpack}")
        lines.append("        x, y = flat(FORM, batch).to(DTYPE), labels(FORM, batch)")
        lines.append(f"        per, extra = {self.draw.choice(ERRORS)}, 0.0")
        lines += [_indented(part.loss, 8) for part in self.strange if part.loss]
        pair = "(per.sum() + extra * len(per), len(per))"
        lines.append(f"        return {self.draw.choice(('per.mean() + extra', pair))}")
        return "\n".join((*lines, "", "    return loss_fn"))

    def _optimizer(self) -> str:
        given = next((part.optimizer for part in self.strange if part.optimizer), "")
        plain = self.draw.choice(OPTIMIZERS)
        if "complex" in " ".join(part.name for part in self.strange):
            plain = plain.replace(", fused=True", "")  # which takes no complex parameters
        schedule = next((part.scheduler for part in self.strange if part.scheduler), "None")
        groups = self.draw.choice(("list(parameters)", "list(parameters)", "two_groups(parameters)"))
        return (
            "def optimizer_for(model, own):\n    parameters = [*model.parameters(), *own]\n"
            f"    groups = {groups}\n    return {given or plain}\n\n\n"
            f"def scheduler_for(optimizer):\n    return {schedule}"
        )

    def _loop(self) -> str:
        before = [_indented(part.before, 4) for part in self.strange if part.before] or ["    pass"]
        after = [_indented(part.after, 4) for part in self.strange if part.after] or ["    pass"]
        return "\n".join(("def before(run):", *before, "\n\ndef after(run, step):", *after))


def _indented(lines: str, by: int) -> str:
    return "\n".join(" " * by + line if line else "" for line in lines.splitlines())


def _fit(one: Part, two: Part) -> bool:
    """Whether a program may have both."""
    if one.name == two.name:
        return False
    for field in ("outputs", "optimizer", "scheduler", "dtype", "batch", "skeleton", "after_build"):
        if getattr(one, field) and getattr(two, field):
            return False
    names = {"resumed in another session", "saved and loaded in between"}
    if one.kind == two.kind == "edits":
        return False
    if (one.name in names and not two.resumes) or (two.name in names and not one.resumes):
        return False
    return not (one.loss and two.loss) and not (one.define and two.define and "LOSS_MODULE" in one.define + two.define)


def strange_of(seed: int) -> list[Part]:
    """What is strange in the program of a seed; parts take turns, so that few seeds have all."""
    draw = random.Random(f"strange {seed}")
    if seed >= ALONE:
        return [STRANGE[(seed - ALONE) % len(STRANGE)]]
    if seed % 3 == 0:
        return []
    turn = seed - 1 - seed // 3
    first = STRANGE[turn * 89 % len(STRANGE)]
    if draw.random() < 0.65:
        return [first]
    kinds = sorted({part.kind for part in STRANGE} - {first.kind})
    while True:
        kind = draw.choice(kinds)
        second = draw.choice([part for part in STRANGE if part.kind == kind])
        if _fit(first, second):
            return [first, second]


def chosen(healthy: int = 20, strange: int = 40) -> list[int]:
    """Seeds that `make test` plays, of 500: kinds take turns."""
    left: dict[str, list[int]] = {}
    for seed in random.Random(36).sample(range(500), 500):
        if parts := strange_of(seed):
            left.setdefault(parts[0].kind, []).append(seed)
    found: list[int] = list(range(0, 3 * healthy, 3))
    while len(found) < healthy + strange:
        found += [seeds.pop() for _, seeds in sorted(left.items()) if seeds]
    return found[: healthy + strange]


def drawn(seed: int, strange: Sequence[Part] | None = None) -> Program:
    """Return the program of a seed, or with other strange things than the seed's own."""
    parts = strange_of(seed) if strange is None else list(strange)
    one = _Drawn(seed, parts)
    return Program(
        seed,
        tuple(part.name for part in parts),
        tuple(part.kind for part in parts),
        any(part.draws for part in parts),
        next((part.dtype for part in parts if part.dtype), "float64"),
        max((part.tolerance for part in parts), default=0.0),
        one.has_tables,
        one.text(),
    )


def without(program: Program, name: str) -> Program:
    """The same program without one of its strange things."""
    left = [BY_NAME[other] for other in program.strange if other != name]
    return replace(drawn(program.seed, left), seed=program.seed)


if __name__ == "__main__":
    print(drawn(int(sys.argv[1])).text)
