"""The training loop of a script: what is the forward, the loss, the update and the rest."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from weft.migrate.script._names import called, names_in, resolve, targets_of
from weft.migrate.script._peers import UNWRAPPED

UPDATES = (
    "step",
    "zero_grad",
    "backward",
    "manual_backward",
    "clip_grad_norm_",
    "clip_gradients",
    "unscale_",
    "update",
)


@dataclass(slots=True)
class TrainLoop:
    """One loop over batches with one backward."""

    loop: ast.For
    loader: ast.expr
    """What it goes through."""
    batch: ast.expr
    """The target that takes a batch."""
    before: list[ast.stmt] = field(default_factory=list[ast.stmt])
    forward: list[ast.stmt] = field(default_factory=list[ast.stmt])
    """Statements from the first call of the model up to the backward that the loss depends on."""
    loss: ast.expr | None = None
    after: list[ast.stmt] = field(default_factory=list[ast.stmt])
    """Statements that follow the step: what is not the update itself."""
    model: str = ""
    model_call: ast.Call | None = None
    optimizers: set[str] = field(default_factory=set[str])
    max_grad_norm: ast.expr | None = None
    accumulation: ast.expr | None = None
    """What the loss is divided by, so that microbatches sum to a mean."""
    problems: list[tuple[ast.stmt, str]] = field(default_factory=list[tuple[ast.stmt, str]])


def backward_of(statement: ast.stmt, handles: set[str]) -> ast.expr | None:
    """Return the loss of a statement that is a backward."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
        return None
    owner = call.func.value
    if isinstance(owner, ast.Name) and owner.id in handles and call.args:
        return call.args[0]
    return None if call.args else owner


def flattened(body: list[ast.stmt], handles: set[str]) -> Iterator[ast.stmt]:
    """Yield the statements of a loop's body, with those inside of contexts and conditions that go with accumulation."""
    for statement in body:
        if isinstance(statement, ast.With):
            goes = all(called(item.context_expr) in UNWRAPPED for item in statement.items)
        else:
            goes = isinstance(statement, ast.If) and not statement.orelse and _is_accumulation(statement, handles)
        if goes and isinstance(statement, ast.With | ast.If):
            yield from flattened(statement.body, handles)
        else:
            yield statement


def _is_accumulation(statement: ast.If, handles: set[str]) -> bool:
    """`if (i + 1) % n == 0:` or `if accelerator.sync_gradients:` around nothing but the update."""
    counts = any(isinstance(node, ast.Mod) for node in ast.walk(statement.test))
    syncs = any(isinstance(node, ast.Attribute) and node.attr == "sync_gradients" for node in ast.walk(statement.test))
    calls = [s.value if isinstance(s, ast.Expr) else None for s in flattened(statement.body, handles)]
    return syncs or (counts and all(isinstance(call, ast.Call) and called(call) in UPDATES for call in calls))


def find_loops(tree: ast.AST, handles: set[str], models: set[str], imports: dict[str, str]) -> list[TrainLoop]:
    """Return the innermost loops that have a backward."""
    found: list[TrainLoop] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            statements = list(flattened(node.body, handles))
            if any(backward_of(statement, handles) is not None for statement in statements):
                found.append(_read(node, statements, handles, models, imports))
    return found


def _read(
    loop: ast.For, statements: list[ast.stmt], handles: set[str], models: set[str], imports: dict[str, str]
) -> TrainLoop:
    loader, batch = loop.iter, loop.target
    if called(loader) == "enumerate" and isinstance(loader, ast.Call) and isinstance(batch, ast.Tuple):
        loader, batch = loader.args[0], batch.elts[1]
    if isinstance(loader, ast.Call) and called(loader) in ("tqdm", "trange", "track") and loader.args:
        loader = loader.args[0]
    read = TrainLoop(loop, loader, batch)
    losses = [number for number, s in enumerate(statements) if backward_of(s, handles) is not None]
    if len(losses) != 1:
        read.problems.append((loop, "this loop has several backwards: " + SEVERAL))
        return read
    read.loss = backward_of(statements[losses[0]], handles)
    for number, statement in enumerate(statements):
        if number == losses[0] or _take_update(read, statement, handles, imports):
            continue
        if number > losses[0]:
            read.after.append(statement)
        elif read.forward or _calls(statement, models):
            read.forward.append(statement)
        else:
            read.before.append(statement)
    _keep_what_makes_the_loss(read, models)
    _take_division(read)
    _take_model(read, models)
    return read


def _take_division(read: TrainLoop) -> None:
    """`loss = loss / n` before the backward, or `(loss / n).backward()`: a step of Weft is a mean by itself."""
    last = read.forward[-1] if read.forward else None
    if isinstance(read.loss, ast.BinOp) and isinstance(read.loss.op, ast.Div) and isinstance(read.loss.left, ast.Name):
        read.loss, read.accumulation = read.loss.left, read.loss.right
    elif isinstance(read.loss, ast.Name) and read.loss.id in (list(targets_of(last)) if last is not None else []):
        value = last.value if isinstance(last, ast.Assign | ast.AugAssign) else None
        divides = isinstance(last, ast.AugAssign) and isinstance(last.op, ast.Div)
        if divides or (
            isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) and _is(value.left, read.loss.id)
        ):
            read.accumulation = value.right if isinstance(value, ast.BinOp) and not divides else value
            read.forward.pop()


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _keep_what_makes_the_loss(read: TrainLoop, models: set[str]) -> None:
    """Leave in the forward what the loss depends on; sums and prints beside it follow the step."""
    needed = names_in(read.loss) if read.loss is not None else set[str]()
    kept: list[ast.stmt] = []
    beside: list[ast.stmt] = []
    for statement in reversed(read.forward):
        sets = {name for part in ast.walk(statement) for name in targets_of(part)}
        if sets & needed or _calls(statement, models):
            kept.append(statement)
            needed |= names_in(statement)
        else:
            beside.append(statement)
    read.forward, read.after = kept[::-1], [*beside[::-1], *read.after]


SEVERAL = (
    "several losses of one model go into `with state.manual_step(batch) as step:`, each by step.backward(loss); of"
    " several models prepare each with its optimizer and a loss of its own, and call one state.step(…) after the other;"
    " the side that stays fixed stands inside `with state.frozen():` (examples/adversarial.py)"
)


def _take_update(read: TrainLoop, statement: ast.stmt, handles: set[str], imports: dict[str, str]) -> bool:
    """Take a statement that the step does by itself."""
    call = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    if not isinstance(call, ast.Call):
        return False
    word, owner = called(call), call.func.value if isinstance(call.func, ast.Attribute) else None
    if word == "zero_grad" and isinstance(owner, ast.Name):
        read.optimizers.add(owner.id)
        return True
    if word == "clip_grad_norm_" or (word == "clip_gradients" and resolve(call.func, imports)):
        named = [keyword.value for keyword in call.keywords if keyword.arg in ("max_norm", "clip_norm")]
        read.max_grad_norm = (named or call.args[1:2] or [None])[0]
        return True
    is_update = word == "step" and isinstance(owner, ast.Name) and not _is_schedule(owner.id)
    if is_update and isinstance(owner, ast.Name) and not call.args:
        read.optimizers.add(owner.id)
        return True
    return False


def _is_schedule(name: str) -> bool:
    return any(word in name.lower() for word in ("sched", "warmup", "prof", "state", "progress", "bar"))


def _calls(node: ast.AST, models: set[str]) -> bool:
    return any(
        isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in models
        for part in ast.walk(node)
    )


def _take_model(read: TrainLoop, models: set[str]) -> None:
    parts = [part for s in [*read.before, *read.forward] for part in ast.walk(s)]
    parts += list(ast.walk(read.loss)) if read.loss is not None else []
    calls = [p for p in parts if isinstance(p, ast.Call) and isinstance(p.func, ast.Name) and p.func.id in models]
    if len(calls) != 1:
        what = "no model is called" if not calls else f"models are called {len(calls)} times"
        more = SEVERAL if calls else "write a loss of (outputs, batch), and state.step(batch)"
        read.problems.append((read.loop, f"{what} before the backward: {more}"))
        return
    read.model_call = calls[0]
    function = calls[0].func
    assert isinstance(function, ast.Name)
    read.model = function.id
    bound = {name for statement in read.forward for name in targets_of(statement)}
    used = names_in(read.after)
    loss = {read.loss.id} if isinstance(read.loss, ast.Name) else set[str]()
    for statement in read.after:
        lost = sorted((names_in(statement) & bound & used) - loss)
        if lost:
            read.problems.append(
                (
                    statement,
                    f"{', '.join(lost)} of the forward is not here any more: take it from state.evaluate or"
                    " state.predict, or note it inside the loss",
                )
            )
