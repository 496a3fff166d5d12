"""Drawn programs of a session's calls, as scripts: what all ranks do, what one of them does otherwise, and what that
deserves.

    python tests/api/session_programs.py SEED > program.py     # one of them, to be looked at
    PYTHONPATH=tests/api weft launch --processes 2 program.py

A program is drawn as blocks.  What the ranks call, and under which settings, is followed through the blocks: from where
that differs between them, nothing else than an error is right.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from program_kit import BATCH, KINDS, ROWS

Ends = Literal["right", "error", "either"]
STEPS_PER_EPOCH = -(-ROWS // BATCH)


@dataclass
class Course:
    """Where a rank is in a session, and what it has called there that others must call too."""

    steps: int = 0
    rate: float = 1.0
    saved: tuple[int, float] | None = None
    calls: list[object] = field(default_factory=list[object])

    def step(self, number: int, name: str = "step") -> None:
        for _ in range(number):
            self.calls.append((name, self.steps, self.rate))
            self.steps += 1

    def call(self, name: str) -> None:
        self.calls.append(name)

    def save(self) -> None:
        self.saved = (self.steps, self.rate)
        self.calls.append(("save", self.steps, self.rate))

    def load(self) -> None:
        self.calls.append("load")
        if self.saved is not None:
            self.steps, self.rate = self.saved


@dataclass(frozen=True)
class Block:
    """Some lines, and what they do to the course of a rank."""

    lines: tuple[str, ...]
    effect: Callable[[Course], None]

    def silent(self) -> Block:
        """The same without a note of its results."""
        return replace(self, lines=tuple(line.replace("note(", "ignore(") for line in self.lines))


NOTHING = Block(("pass",), lambda course: None)


def _steps(number: int, *, scheduled: bool = False) -> Block:
    lines = (f"for batch in state.batches({number}):", "    note(state.step(batch).loss)")

    def effect(course: Course) -> None:
        for _ in range(number):
            course.step(1)
            course.rate *= 0.9 if scheduled else 1.0

    return Block((*lines, "    scheduler.step()") if scheduled else lines, effect)


MANUAL = (
    "with state.manual_step(batch) as step:",
    "    rows = step.total(len(batch[0]))",
    "    for part in step.parts():",
    "        step.backward(loss_fn(state.model(part[0]), part)[0], of=rows)",
)


def _manual(number: int) -> Block:
    """Steps whose backwards the loop writes."""
    lines = (f"for batch in state.batches({number}):", *(f"    {line}" for line in MANUAL), "    note(step.event.loss)")

    def effect(course: Course) -> None:
        course.step(number, "manual step")

    return Block(lines, effect)


def _epochs(number: int) -> Block:
    lines = (f"for epoch in state.epochs({number}):", "    note(epoch.number)", "    for batch in epoch:")
    to = number * STEPS_PER_EPOCH
    return Block(
        (*lines, "        note(state.step(batch).loss)"), lambda course: course.step(max(to - course.steps, 0))
    )


def _call(name: str, *lines: str) -> Block:
    """A call that must be the same on all ranks, with all that it is given."""
    return Block(lines, lambda course: course.call(f"{name} {' '.join(lines)}"))


def _halve(course: Course) -> None:
    course.rate *= 0.5


RATE = Block(("for group in optimizer.param_groups:", '    group["lr"] *= 0.5'), _halve)
SAVE = Block(("state.save()",), Course.save)
LOAD = Block(("state.load()", "note(state.steps)"), Course.load)
BY_HAND = (
    "optimizer.step()",
    "optimizer.state_dict()",
    "loss_fn(model(batch[0]), batch)[0].backward()",
)


def _caught(line: str, kind: str) -> Block:
    """Something that is refused; of a model cut over the tensor axis all ranks make the forward before it."""
    lines = ("batch = next(state.batches())", "try:", f"    {line}", '    note("silent")', "except weft.WeftError:")
    lines = (*lines, '    note("refused")')
    return _call("forward", *lines) if kind == "tensor" and "model(" in line else Block(lines, lambda course: None)


def _draw_block(draw: random.Random, number: int, *, has_save: bool, kind: str) -> Block:
    """One block that a whole program may have; `number` makes its names its own."""
    data = f"held_out({draw.choice((3, 7, 12, 30))}, {draw.choice((1, 5, 12, 30))})"
    kinds: list[Callable[[], Block]] = [
        lambda: _steps(draw.randint(1, 3)),
        lambda: _steps(draw.randint(1, 2), scheduled=True),
        lambda: _epochs(draw.randint(1, 2)),
        lambda: _call("evaluate", f"note(state.evaluate({data}))"),
        lambda: _call("evaluate", f'note(state.evaluate({data}, {{"errors": errors}}))'),
        lambda: _call("predict", f"note(state.predict({data}))"),
        lambda: _call("gather", "for batch in state.batches(1):", "    note(state.gather(batch[0]))"),
        lambda: SAVE,
        lambda: _call("export", f'note(stored(state.export(folder / "export-{number}")))'),
        lambda: _call("first", "with session.first():", "    note(1)"),
        lambda: Block(('session.print("said")',), lambda course: None),
        lambda: RATE,
    ]
    if kind != "pipeline":  # where no rank has a forward of its own
        kinds += [lambda: _caught(draw.choice(BY_HAND), kind), lambda: _manual(draw.randint(1, 2))]
    if has_save:
        kinds += [lambda: LOAD, lambda: LOAD]
    return draw.choice(kinds)()


@dataclass
class Program:
    """A script, and what it deserves on two ranks of which `odd` may be another than on the other."""

    seed: int
    kind: str
    odd: int
    what: str
    ends: Ends
    text: str


ARGUMENTS = {"lr": "1e-2", "rows": str(ROWS), "batch": str(BATCH), "clip": "None", "seed": "1234", "width": "16"}
"""What a session and its prepare are told."""
OTHERS = {"lr": "2e-2", "rows": "62", "batch": "24", "clip": "0.5", "seed": "7", "width": "18"}
PREPARE = """\
with weft.session(plan_for("{kind}"), permit=("fp64",), seed={seed}, folder=folder / "{place}", quiet=True) as session:
    is_odd = session.rank == odd
    model = Net({width})
    optimizer = torch.optim.{optimizer}(model.parameters(), lr={lr})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    loader = DataLoader(samples({rows}), batch_size={batch}, shuffle={shuffle})
    state = session.prepare(
        model, optimizer, loader, loss=loss_fn, cut=CUT, split=SPLIT, max_grad_norm={clip}
    )
    counts = Counts()
    state.attach(counts=counts)
"""

ON_ALL: Sequence[tuple[Ends, str, tuple[str, ...]]] = (
    *(("error", line, ("batch = next(state.batches())", line)) for line in BY_HAND[:2]),
    ("error", "half a share", ("for batch in state.batches(1):", "    state.step([part[:1] for part in batch])")),
    ("error", "an error of the loop", ('raise ValueError("of the loop")',)),
    ("error", "an error of the loss", ("Trouble.in_loss = True", "for batch in state.batches(1): state.step(batch)")),
    ("error", "prepare once more", ("session.prepare(model, optimizer, loader, loss=loss_fn, cut=CUT, split=SPLIT)",)),
    ("error", "a step after close", ("batch = next(state.batches())", "session.close()", "state.step(batch)")),
    ("error", "a part left out", ("for batch in state.batches(1):", "    with state.manual_step(batch): pass")),
    (
        "error",
        "a backward of its own",
        (
            "for batch in state.batches(1):",
            *(f"    {line}" for line in MANUAL[:3]),
            "            loss_fn(state.model(part[0]), part)[0].backward()",
        ),
    ),
    ("error", "a load of nothing", ('state.load(folder / "nowhere")',)),
    ("error", "an attachment that is none", ("state.attach(thing=3)",)),
    ("error", "no number of epochs", ("state.epochs(-1)",)),
    ("error", "a metric that is none", ('state.evaluate(held_out(7, 5), {"errors": 3})',)),
    ("error", "outputs without rows", ("state.predict(held_out(7, 5), outputs=lambda outputs, batch: outputs.sum())",)),
    ("either", "no samples", ("note(str(state.evaluate([])))", "note(state.predict([]))")),
    ("either", "a session inside", ("with weft.session(quiet=True) as inner:", '    inner.print("inside")')),
    ("either", "an evaluation after close", ("session.close()", "note(state.evaluate(held_out(7, 5)))")),
    ("either", "a save after close", ("session.close()", "state.save()")),
)
"""What every rank may do that is not as it should be."""
AFTER: Sequence[tuple[Ends, str, tuple[str, ...]]] = (
    ("error", "a step after the session", ("state.step(next(state.batches()))",)),
    ("error", "an evaluation after the session", ("state.evaluate(held_out(7, 5))",)),
    ("error", "a save after the session", ("state.save()",)),
    ("error", "a prepare after the session", ("session.prepare(Net(), optimizer, loader, loss=loss_fn)",)),
    ("error", "a section after the session", ("with session.first(): pass",)),
    ("either", "a print after the session", ('session.print("said")',)),
)
ON_ONE: Sequence[tuple[Ends, str, tuple[str, ...]]] = (
    ("error", "an error of the loop", ('raise ValueError("of the loop")',)),
    ("error", "an exit", ("sys.exit(3)",)),
    ("error", "Ctrl-C", ("raise KeyboardInterrupt",)),
    ("error", "an error of the loss", ("Trouble.in_loss = True",)),
    ("error", "close", ("session.close()",)),
    ("error", "scheduler.step()", ("scheduler.step()",)),
    ("error", "other counts", ("counts.seen += 1",)),
    ("error", "another attachment", ("state.attach(more=Counts())",)),
    ("error", "eval()", ("state.model.eval()",)),
    ("error", "a frozen weight", ("next(p for p in state.model.parameters()).requires_grad_(False)",)),
    ("error", "an error in the section", ('with session.first(): raise ValueError("of the section")',)),
    ("right", "print()", ('session.print("said"); print(state.steps, len(state.epochs(9)), session.rank_failure)',)),
    ("right", "a generator that is drawn from", ("torch.randn(3)",)),
    ("right", "a generator that is seeded", ("torch.manual_seed(77)",)),
)
"""What one rank may do before a step, a save and an evaluation."""
OTHERWISE: Sequence[tuple[str, str, str]] = (
    ("evaluate", "state.evaluate(held_out(7, 5))", "state.evaluate(held_out(9, 5))"),
    ("the order of an evaluation", "state.evaluate(held_out(7, 5))", "state.evaluate(held_out(7, 5, shuffled=3))"),
    ("the order of predictions", "state.predict(held_out(30, 5))", "state.predict(held_out(30, 5, shuffled=3))"),
    ("metrics", "state.evaluate(held_out(7, 5))", 'state.evaluate(held_out(7, 5), {"errors": errors})'),
    ("more metrics", 'state.evaluate(held_out(7, 5), {"a": errors})', 'state.evaluate(held_out(7, 5), {"b": errors})'),
    ("the batches of an evaluation", "state.evaluate(held_out(30, 5))", "state.evaluate(held_out(30, 12))"),
    ("rows", "state.gather(torch.ones(2, 3))", "state.gather((torch.ones(2, 3), torch.ones(2)))"),
    ("widths", "state.gather(torch.ones(2, 3))", "state.gather(torch.ones(2, 4))"),
    ("the folder of an export", 'state.export(folder / "x")', 'state.export(folder / "y")'),
    ("the path of a load", "state.load(path)", "state.load(path.parent)"),
    ("a step with other data", "state.step(batch)", "state.step([part[:1] for part in batch])"),
    ("a manual step", "state.step(batch)", "with state.manual_step(batch) as step: list(step.parts())"),
    (
        "the total of a step",
        "with state.manual_step(batch) as step: step.total(1); list(step.parts())",
        "with state.manual_step(batch) as step: list(step.parts())",
    ),
    ("evaluate in place of predict", "state.evaluate(held_out(7, 5))", "state.predict(held_out(7, 5))"),
)
"""What one rank may call in another way than the others."""


class _Drawn:
    """One program on its way."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.kind = self.draw.choice((*KINDS, *KINDS, "auto"))
        self.odd = self.draw.randrange(2)
        self.what = ""
        self.ends: Ends = "right"
        self.given = dict(ARGUMENTS)
        self.after: tuple[str, ...] = ()
        self.blocks: list[Block] = []
        for number in range(self.draw.randint(2, 5)):
            has_save = any(block is SAVE for block in self.blocks)
            self.blocks.append(_draw_block(self.draw, number, has_save=has_save, kind=self.kind))

    def same_on_all(self) -> None:
        """Nothing is odd."""
        self.what = "nothing is odd"

    def wrong_on_all(self) -> None:
        self.ends, what, lines = self.draw.choice(ON_ALL)
        self.what = f"all ranks: {what}"
        place = self.draw.randint(0, len(self.blocks))
        self.blocks[place:] = [Block(lines, lambda course: None)]

    def wrong_after(self) -> None:
        self.ends, what, self.after = self.draw.choice(AFTER)
        self.what = f"all ranks: {what}"

    def prepared_otherwise(self) -> None:
        name = self.draw.choice(sorted(ARGUMENTS))
        self.given[name] = f"{OTHERS[name]} if session.rank == odd else {ARGUMENTS[name]}"
        if name == "seed":  # before there is a session
            self.given[name] = f"{OTHERS[name]} if own_rank == odd else {ARGUMENTS[name]}"
        self.what, self.ends = f"rank {self.odd} is prepared with another {name}", "error"

    def wrong_on_one(self) -> None:
        # A stage may have a frozen weight that no other has.
        known = [one for one in ON_ONE if self.kind != "pipeline" or one[1] != "a frozen weight"]
        self.ends, what, lines = self.draw.choice(known)
        self.what = f"rank {self.odd}: {what}"
        place = self.draw.randint(0, len(self.blocks))
        odd = Block(("if is_odd:", *(f"    {line}" for line in lines)), lambda course: None)
        rest = () if self.ends == "right" else (_steps(1), SAVE, _steps(1))
        self.blocks[place:] = [odd, *rest, *(self.blocks[place:] if self.ends == "right" else ())]

    def called_otherwise(self) -> None:
        what, mine, odd = self.draw.choice(OTHERWISE)
        lines = ("path = state.save()", "batch = next(state.batches())", "if is_odd:", f"    {odd}", "else:")
        place = self.draw.randint(0, len(self.blocks))
        self.blocks[place:] = [Block((*lines, f"    {mine}"), lambda course: None)]
        self.what, self.ends = f"rank {self.odd}: another call in {what}", "error"

    def other_calls(self) -> None:
        """One rank leaves out, adds, exchanges or changes blocks; whether that matters follows from the courses."""
        place = self.draw.randrange(len(self.blocks))
        new = _draw_block(self.draw, 9, has_save=False, kind=self.kind)
        odd = list(self.blocks)
        match self.draw.choice(("leaves out", "adds", "changes", "exchanges")):
            case "leaves out":
                odd[place : place + 1], mine, own = [NOTHING], [self.blocks[place]], [NOTHING]
                self.what = f"rank {self.odd} leaves out a block"
            case "adds":
                odd.insert(place, new)
                mine, own = [NOTHING], [new]
                self.what = f"rank {self.odd} adds a block"
            case "changes":
                odd[place] = new
                mine, own = [self.blocks[place]], [new]
                self.what = f"rank {self.odd} changes a block"
            case _:
                odd[place : place + 2] = own = self.blocks[place : place + 2][::-1]
                mine = self.blocks[place : place + 2]
                self.what = f"rank {self.odd} exchanges blocks"
        self.ends = "right" if _course(odd).calls == _course(self.blocks).calls else "error"
        end = place + (0 if mine == [NOTHING] else len(mine))
        self.blocks[place:end] = [_either(mine, own)]

    def text(self, sessions: int) -> str:
        lines = [f'"""Seed, plan and what is odd: {{seed}}, {self.kind}, {self.what}."""', ""]
        lines += ["from program_kit import *", "", "", "def main(folder, note, odd, own_rank):"]
        lines += ["    ignore = lambda value: None"]
        settings = {"optimizer": self.draw.choice(("SGD", "AdamW")), "shuffle": str(self.draw.random() < 0.7)}
        for place in range(sessions):
            last = place == sessions - 1
            blocks = self.blocks if last else [_steps(self.draw.randint(1, 2)), SAVE]
            given = self.given if last else ARGUMENTS
            text = PREPARE.format(**given, **settings, kind=self.kind, place=place)
            lines += [f"    {line}" for line in text.splitlines()]
            lines += [f"        {line}" for block in blocks for line in block.lines]
        lines += [f"    {line}" for line in self.after]
        lines += ["", "", 'if __name__ == "__main__":']
        lines += ["    import os, tempfile", ""]
        lines += [f'    main(Path(tempfile.gettempdir(), "program"), print, {self.odd}, int(os.environ["RANK"]))', ""]
        return "\n".join(lines)


def _either(mine: Sequence[Block], own: Sequence[Block]) -> Block:
    lines = ["if is_odd:", *(f"    {line}" for block in own for line in block.silent().lines)]
    lines += ["else:", *(f"    {line}" for block in mine for line in block.lines)]
    return Block(tuple(lines), lambda course: None)


def _course(blocks: Sequence[Block]) -> Course:
    course = Course()
    for block in blocks:
        block.effect(course)
    return course


def drawn(seed: int) -> Program:
    """Return the program of a seed."""
    one = _Drawn(seed)
    ways = (
        *((one.same_on_all,) * 6 + (one.wrong_on_all,) * 3 + (one.wrong_after,) + (one.prepared_otherwise,)),
        *((one.wrong_on_one,) * 4 + (one.called_otherwise,) * 3 + (one.other_calls,) * 5),
    )
    one.draw.choice(ways)()
    text = one.text(sessions=one.draw.choice((1, 1, 1, 2))).replace("{seed}", str(seed))
    return Program(seed, one.kind, one.odd, one.what, one.ends, text)


if __name__ == "__main__":
    print(drawn(int(sys.argv[1])).text)
