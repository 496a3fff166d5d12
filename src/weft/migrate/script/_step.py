"""A training loop as `state.step(batch)`, its loss as a function, and its setup as `session.prepare`."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping

from weft.migrate.script._loop import TrainLoop, find_loops
from weft.migrate.script._names import called, keyword_of, names_in, resolve, targets_of
from weft.migrate.script._words import Script

_MOVES = ("to", "cuda", "to_device", "contiguous", "long", "float")
_FLOATS = ("item", "detach", "float", "cpu", "mean", "sum")
_GATHERS = ("gather", "gather_for_metrics", "reduce", "all_reduce", "all_gather")


def translate_loops(script: Script) -> None:
    """Rewrite the training loop and the setup, where the loop can be understood; say what stands in the way."""
    loops = find_loops(script.source.tree, script.handles | script.engines, script.models, script.imports)
    if not loops:
        for statement in script.setups[:1]:
            script.say(
                statement,
                "no loop with a backward was found here: write state = session.prepare(model, optimizer, loader,"
                " loss=…), and state.step(batch) where the loop is",
            )
        return
    loop = loops[0]
    for other in loops[1:]:
        script.say(other.loop, "only one training loop is rewritten; this one needs a session.prepare of its own")
    scope = script.source.scope_of(loop.loop)
    elsewhere = [setup for setup in script.setups if script.source.scope_of(setup) is not scope]
    problem = next((text for _, text in loop.problems if loop.model_call is None), "")
    if not problem and elsewhere:
        script.say(
            elsewhere[0],
            "write state = session.prepare(model, optimizer, loader, loss=…) here, and hand the state to the loop",
        )
        problem = "the setup stands in another function: hand its state to this one"
    fields = None if problem else _fields(script, loop)
    if not problem and fields is None:
        problem = "what the model is given is no field of the batch as the loader gives it: let the dataset give it"
    if problem or fields is None:
        script.say(loop.loop, f"{problem}. Then write state.step(batch) in place of forward, backward and update")
        return
    for statement, text in loop.problems:
        script.say(statement, text)
    if loop.accumulation is not None:
        script.accumulation = script.source.rendered(loop.accumulation)
        if isinstance(loop.accumulation, ast.Constant):
            script.options["accumulate"] = script.accumulation
        else:
            script.say(loop.loop, f"accumulation is weft.session(accumulate={script.accumulation})")
    _write(script, loop, fields)


# ── what the model is given ───────────────────────────────────────────────────────────────────────────────────────────


def _fields(script: Script, loop: TrainLoop) -> str | None:
    """Return the text of prepare's `inputs`, empty where they are found by name; None where they are no fields."""
    call, known = loop.model_call, _unpacked(loop)
    assert call is not None
    if any(keyword.arg is None for keyword in call.keywords):
        makers = [*loop.forward, *([loop.loss] if loop.loss is not None else [])]
        reads_loss = any(isinstance(n, ast.Attribute) and n.attr == "loss" for s in makers for n in ast.walk(s))
        loader = script.source.text[slice(*script.source.span(loop.loader))]
        return f"{{name: name for name in next(iter({loader}))}}" if reads_loss else ""
    given: dict[str, str] = {}
    parameters = _parameters(script, loop.model)
    for number, argument in enumerate(call.args):
        place = _field_of(argument, known)
        if place is None:
            return None
        given[parameters[number] if number < len(parameters) else f"<argument {number}>"] = place
    for keyword in call.keywords:
        place = _field_of(keyword.value, known)
        if place is None:
            return None
        given[keyword.arg or ""] = place
    if list(given.values()) == ["0"] or all(name == place for name, place in given.items()):
        return ""
    if any(name.startswith("<") for name in given):
        script.say(loop.loop, "name the arguments of the model's forward in prepare's inputs")
    return "{" + ", ".join(f'"{name}": "{place}"' for name, place in given.items()) + "}"


def _unpacked(loop: TrainLoop) -> dict[str, str]:
    """Name → field of the batch, by the loop's target and by plain assignments before the forward."""
    known: dict[str, str] = {}
    _unpack(loop.batch, known)
    for statement in loop.before:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(target, ast.Tuple) and _is_batch(statement.value, loop):
                _unpack(target, known)
            elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                for part, value in zip(target.elts, statement.value.elts, strict=False):
                    _note(part, value, known, loop)
            else:
                _note(target, statement.value, known, loop)
    return known


def _note(target: ast.expr, value: ast.expr, known: dict[str, str], loop: TrainLoop) -> None:
    place = _field_of(value, known)
    if isinstance(target, ast.Name) and place is not None:
        known[target.id] = place
    elif isinstance(target, ast.Name) and _is_batch(value, loop):
        known[target.id] = "batch"
    elif isinstance(target, ast.Name):
        known.pop(target.id, None)


def _unpack(target: ast.expr, known: dict[str, str]) -> None:
    if isinstance(target, ast.Tuple):
        for number, part in enumerate(target.elts):
            if isinstance(part, ast.Name):
                known[part.id] = str(number)
    elif isinstance(target, ast.Name):
        known[target.id] = "batch"


def _is_batch(node: ast.expr, loop: TrainLoop) -> bool:
    """`batch`, `[x.to(device) for x in batch]`, `{k: v.to(device) for k, v in batch.items()}`."""
    if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp):
        return isinstance(loop.batch, ast.Name) and loop.batch.id in names_in(node.generators[0].iter)
    return isinstance(node, ast.Name) and isinstance(loop.batch, ast.Name) and node.id == loop.batch.id


def _field_of(node: ast.expr, known: Mapping[str, str]) -> str | None:
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MOVES:
        node = node.func.value
    if isinstance(node, ast.Name):
        place = known.get(node.id)
        return "0" if place == "batch" else place
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and known.get(node.value.id) == "batch":
        return str(node.slice.value) if isinstance(node.slice, ast.Constant) else None
    return None


def _parameters(script: Script, model: str) -> list[str]:
    """Names of the arguments of the forward of a model whose class stands in the script."""
    classes = {node.name: node for node in ast.walk(script.source.tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(script.source.tree):
        if isinstance(node, ast.Assign) and model in targets_of(node) and isinstance(node.value, ast.Call):
            word = called(node.value)
            if word == "Sequential":
                return ["input"]
            for method in classes[word].body if word in classes else []:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    return [argument.arg for argument in method.args.args[1:]]
    return []


# ── what is written ───────────────────────────────────────────────────────────────────────────────────────────────────


def _write(script: Script, loop: TrainLoop, inputs: str) -> None:
    source = script.source
    assert loop.model_call is not None
    outputs, body = _loss_body(script, loop)
    batch = loop.batch.id if isinstance(loop.batch, ast.Name) else "batch"
    loader = source.rendered(loop.loader)
    model, optimizer = _prepared(script, loop)
    arguments = [model, optimizer, loader, f"loss={_LOSS}"]
    arguments += [f"inputs={inputs}"] if inputs else []
    arguments += [f"max_grad_norm={source.rendered(loop.max_grad_norm)}"] if loop.max_grad_norm is not None else []
    function = f"def {_LOSS}({outputs}, {batch}):\n{textwrap.indent(body, '    ')}"
    prepare = f"state = session.prepare({', '.join(arguments)})\n"
    if len(prepare) > _WIDTH:
        prepare = "state = session.prepare(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")\n"
    _place(script, loop, f"\n{function}\n{prepare}")
    _write_loop(script, loop, batch)
    _widen_batch(script, loader)


_LOSS = "loss_fn"
_WIDTH = 100


def _loss_body(script: Script, loop: TrainLoop) -> tuple[str, str]:
    """The name of the outputs, and the lines of the loss."""
    source, call = script.source, loop.model_call
    assert call is not None
    assert loop.loss is not None
    lines: list[str] = []
    outputs, statements = "outputs", loop.forward
    first = statements[0] if statements else None
    if isinstance(first, ast.Assign) and first.value is call and isinstance(first.targets[0], ast.Name):
        outputs, statements = first.targets[0].id, statements[1:]
    else:
        source.replace(call, outputs)
    read = names_in([*statements, source.statement_of(loop.loss)]) | names_in(loop.loss)
    if isinstance(loop.batch, ast.Tuple) and any(name in read for name in targets_of(loop.loop)):
        lines.append(f"{source.rendered(loop.batch).strip('()')} = batch\n")
    kept = [s for s in loop.before if isinstance(s, ast.Assign) and any(name in read for name in targets_of(s))]
    lines.append(source.block(kept))
    last = statements[-1] if statements else None
    is_last = isinstance(last, ast.Assign) and isinstance(loop.loss, ast.Name) and loop.loss.id in targets_of(last)
    if is_last and isinstance(last, ast.Assign) and len(last.targets) == 1:
        lines += [source.block(statements[:-1]), f"return {source.rendered(last.value)}\n"]
    else:
        lines += [source.block(statements), f"return {source.rendered(loop.loss)}\n"]
    return outputs, "".join(lines)


def _prepared(script: Script, loop: TrainLoop) -> tuple[str, str]:
    """The names of model and optimizer as they are before the setup."""
    optimizers = sorted(loop.optimizers - script.engines)
    optimizer = optimizers[0] if optimizers else "optimizer"
    if len(optimizers) > 1:
        script.say(loop.loop, f"one optimizer with groups, and not {', '.join(optimizers)}")
    model = loop.model
    for setup in script.setups:
        if isinstance(setup.value, ast.Call) and loop.model in targets_of(setup):
            given = keyword_of(setup.value, "model", 0)
            if resolve(setup.value.func, script.imports) == "deepspeed.initialize":
                named = keyword_of(setup.value, "optimizer")
                optimizer = script.source.rendered(named) if named is not None else optimizer
                if named is None:
                    script.say(setup, "the optimizer of the JSON is one of your own here; weft migrate ds_config.json")
            is_alone = not isinstance(setup.targets[0], ast.Tuple | ast.List)
            if isinstance(given, ast.Name) and (is_alone or loop.model in script.engines):
                model = given.id
    return model, optimizer


def _place(script: Script, loop: TrainLoop, text: str) -> None:
    """Write the loss and `prepare` where the last setup stands; where nothing was set up, before the epochs."""
    source = script.source
    wraps = [s for s in script.setups if resolve(getattr(s.value, "func", s), script.imports).endswith("Parallel")]
    setups = [setup for setup in script.setups if setup not in wraps]
    for setup in script.setups:
        source.remove(setup)
        given = getattr(setup.value, "args", [])
        old = set(targets_of(setup)) - {a.id for a in given if isinstance(a, ast.Name)}
        if setup in wraps or old & script.engines:
            _rename(script, setup, loop)
    if setups:
        last = max(setups, key=lambda setup: setup.lineno)
        source.insert_before(last, text)
        return
    outermost: ast.stmt = loop.loop
    node = source.parents[outermost]
    while isinstance(node, ast.For | ast.While | ast.With):
        outermost, node = node, source.parents[node]
    source.insert_before(outermost, text)


def _rename(script: Script, setup: ast.Assign, loop: TrainLoop) -> None:
    """A wrapped model or an engine under a name of its own is the model again, everywhere after."""
    model, _ = _prepared(script, loop)
    if model == loop.model:
        return
    for node in ast.walk(script.source.tree):
        if isinstance(node, ast.Name) and node.id == loop.model and isinstance(node.ctx, ast.Load):
            parent = script.source.parents[node]
            is_module = isinstance(parent, ast.Attribute) and parent.attr == "module"
            target = parent if is_module and isinstance(parent, ast.Attribute) else node
            script.source.replace(target, model)


def _write_loop(script: Script, loop: TrainLoop, batch: str) -> None:
    source, body = script.source, loop.loop.body
    source.replace(loop.loader, "state.batches()")
    if not isinstance(loop.batch, ast.Name):
        source.replace(loop.batch, batch)
    done = _count_samples(script, loop)
    step = f"{done} = state.step({batch})\n" if done else f"state.step({batch})\n"
    if isinstance(loop.loss, ast.Name) and _reads_loss(script, loop, loop.loss.id):
        step = f"{step}{loop.loss.id} = {done}.loss\n" if done else f"{loop.loss.id} = state.step({batch}).loss\n"
    after = source.block(loop.after)
    kept = [s for s in loop.before if not _is_unpacking(s, loop)]
    indent = source.indent_of(body[0])
    text = source.block(kept) + step + after
    source.replace_lines(body, textwrap.indent(text, indent))


def _reads_loss(script: Script, loop: TrainLoop, name: str) -> bool:
    """Whether a loss is read after its backward; it is a number now, so that `.item()` and the like go."""
    inside = {id(node) for s in [*loop.before, *loop.forward] for node in ast.walk(s)}
    inside |= {id(node) for node in ast.walk(loop.loss)} if loop.loss is not None else set()
    is_read = False
    for node in ast.walk(script.source.scope_of(loop.loop)):
        if id(node) not in inside and isinstance(node, ast.Call | ast.Name) and _is_of_loss(node, name, script):
            is_read = is_read or not isinstance(getattr(node, "ctx", None), ast.Store)
            if isinstance(node, ast.Call):
                script.source.replace(node, name)
    return is_read


def _count_samples(script: Script, loop: TrainLoop) -> str:
    """Let what counts a batch's samples after the step count those of all ranks, and return the step's new name.

    A rank's share, beside a loss of the whole batch, would give a part of the mean.  Empty where nothing counts.
    """
    sized = _size_of_batch(loop)
    found = [node for s in loop.after for node in ast.walk(s) if isinstance(node, ast.Call | ast.Subscript)]
    found = [node for node in found if re.fullmatch(sized, ast.unparse(node))]
    scope = ast.walk(script.source.scope_of(loop.loop))
    taken = {node.id for node in scope if isinstance(node, ast.Name)}
    done = next(name for name in ("step", "done", "step_done", "weft_step") if name not in taken) if found else ""
    for node in found:
        script.source.replace(node, f"{done}.count")
    return done


def _size_of_batch(loop: TrainLoop) -> str:
    """A pattern: `len(x)`, `x.size(0)`, `x.shape[0]`, where `x` is a tensor of the batch, or a field of it."""
    tensors = [re.escape(name) for name in _unpacked(loop)]
    if isinstance(loop.batch, ast.Name):
        parts = [part for statement in loop.loop.body for part in ast.walk(statement)]
        fields = [part for part in parts if isinstance(part, ast.Subscript) and _is_batch(part.value, loop)]
        tensors.append(rf"{loop.batch.id}\[[^][]+\]" if fields else loop.batch.id)
    x = f"(?:{'|'.join(tensors)})"
    return rf"len\({x}\)|{x}\.size\((?:dim=)?0\)|{x}\.shape\[0\]"


def _is_of_loss(node: ast.expr, name: str, script: Script) -> bool:
    """`loss`, `loss.item()`, `accelerator.gather(loss.detach()).mean()`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if script.is_handle(node.func.value):
            if node.func.attr not in _GATHERS or not node.args:
                return False
            node = node.args[0]
        elif node.func.attr in _FLOATS and not node.args:
            node = node.func.value
        else:
            return False
    return isinstance(node, ast.Name) and node.id == name


def _is_unpacking(statement: ast.stmt, loop: TrainLoop) -> bool:
    """Whether a statement before the forward only takes the batch apart or moves it."""
    known = _unpacked(loop)
    if isinstance(statement, ast.Expr) and called(statement.value) in _MOVES:
        return True
    return isinstance(statement, ast.Assign) and all(name in known for name in targets_of(statement))


def _widen_batch(script: Script, loader: str) -> None:
    """Say that the loader's batch is that of a whole step, and write it where accumulation says by how much."""
    for node in ast.walk(script.source.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and loader in targets_of(node):
            size = keyword_of(node.value, "batch_size", 1)
            if called(node.value) == "DataLoader" and size is not None:
                if not script.splits_batches:
                    script.say(
                        node, "batch_size is that of a whole step: what one process had, × accumulation, × processes"
                    )
                if script.accumulation:
                    script.source.replace(size, f"{script.source.rendered(size)} * {script.accumulation}")
                return
