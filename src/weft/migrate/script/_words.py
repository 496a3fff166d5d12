"""The words of a peer, one by one, as those of a session: everything but the setup and the training loop."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from weft.migrate.script._names import called, imports_of, keyword_of, resolve
from weft.migrate.script._peers import (
    ADVICE,
    ATTRIBUTES,
    CALLS,
    CONTEXTS,
    DROPPED,
    FUNCTIONS,
    HANDLES,
    SAME_SAYING,
    SAMPLER,
    UNWRAPPED,
    WORTH_SAYING,
    WRAPPERS,
)
from weft.migrate.script._source import Source

SETUPS = ("prepare", "setup", "setup_dataloaders", "setup_optimizers", "setup_module", "prepare_data_loader",
          "prepare_model", "prepare_optimizer")  # fmt: skip


@dataclass(slots=True)
class Script:
    """A script that is being changed, and what was found in it."""

    source: Source
    imports: dict[str, str] = field(default_factory=dict[str, str])
    handles: set[str] = field(default_factory=set[str])
    """Names of the object through which a script speaks to its library."""
    created: list[ast.Assign] = field(default_factory=list[ast.Assign])
    """Statements that make it."""
    setups: list[ast.Assign] = field(default_factory=list[ast.Assign])
    """Statements that hand models, optimizers and loaders over."""
    models: set[str] = field(default_factory=set[str])
    samplers: set[str] = field(default_factory=set[str])
    engines: set[str] = field(default_factory=set[str])
    """Models that are DeepSpeed's engines, which step by themselves."""
    options: dict[str, str] = field(default_factory=dict[str, str])
    """Arguments of `weft.session`."""
    accumulation: str = ""
    done: set[str] = field(default_factory=set[str])
    """What was said already."""
    splits_batches: bool = False
    """Whether the loader's batch is that of all processes already."""
    is_distributed: bool = False
    """Whether it starts a process group of torch's itself."""

    def say(self, node: ast.AST, text: str) -> None:
        """Say something once."""
        if text and text not in self.done:
            self.done.add(text)
            self.source.comment(node, text)

    def is_handle(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self.handles


def look(source: Source) -> Script:
    """Find handles, setups and models of a script."""
    script = Script(source, imports_of(source.tree))
    for node in ast.walk(source.tree):
        call = node.value if isinstance(node, ast.Assign) else None
        if (
            isinstance(node, ast.Assign)
            and isinstance(call, ast.Call)
            and resolve(call.func, script.imports) in HANDLES
        ):
            script.created.append(node)
            script.handles.update(_names(node))
            _read_options(script, call)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            _look_at(script, node, node.value)
        elif isinstance(node, ast.Call) and resolve(node.func, script.imports).endswith(".init_process_group"):
            script.is_distributed = True
    return script


def _names(statement: ast.Assign) -> list[str]:
    return [node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _look_at(script: Script, statement: ast.Assign, call: ast.Call) -> None:
    names, what = _names(statement), resolve(call.func, script.imports)
    if what in WRAPPERS:
        script.setups.append(statement)
        script.models.update(names)
    elif what == SAMPLER:
        script.samplers.update(names)
        script.source.remove(statement)
    elif what == "deepspeed.initialize":
        script.setups.append(statement)
        script.models.add(names[0])
        script.engines.add(names[0])
    elif isinstance(call.func, ast.Attribute) and script.is_handle(call.func.value) and call.func.attr in SETUPS:
        script.setups.append(statement)
        if call.func.attr not in ("setup_dataloaders", "prepare_data_loader"):
            script.models.update(names)


def _read_options(script: Script, call: ast.Call) -> None:
    """Arguments of `Accelerator` and `Fabric` as those of a session."""
    text = script.source.rendered
    for keyword in call.keywords:
        name, value = keyword.arg or "", keyword.value
        constant = value.value if isinstance(value, ast.Constant) else None
        if name == "gradient_accumulation_steps":
            script.accumulation = script.options["accumulate"] = text(value)
        elif name in ("mixed_precision", "precision"):
            word = str(constant).partition("-")[0]
            if word in ("bf16", "16", "fp16"):
                precision = "bf16" if word == "bf16" else "fp16"
                script.options["permit"] = f'("fp32", "{precision}")'
                script.options["settings"] = f'{{"compute.precision": "{precision}"}}'
            elif constant is None or word not in ("no", "None", "32"):
                script.say(call, f"{name} is weft.session(permit=…, settings={{'compute.precision': …}})")
        elif name in ("cpu", "accelerator") and constant in (True, "cpu"):
            script.options["device"] = '"cpu"'
        elif name == "cpu" and constant is None:
            script.options["device"] = f'"cpu" if {text(value)} else "auto"'
        elif name in ("log_with", "loggers", "project_dir", "project_config"):
            script.say(call, "trackers are told by weft.session(track=…), a function of name, value and step")
        elif name == "dataloader_config" and called(value) == "DataLoaderConfiguration" and isinstance(value, ast.Call):
            split = keyword_of(value, "split_batches", 0)
            script.splits_batches = isinstance(split, ast.Constant) and bool(split.value)
        elif name in ("devices", "num_nodes", "strategy", "accelerator", "cpu", "split_batches"):
            # How many ranks there are is said where they are started; how they share, by the plan.
            script.splits_batches |= name == "split_batches" and constant is True
        else:
            script.say(call, f"{name}= has no place in weft.session; see its arguments")


# ── word by word ──────────────────────────────────────────────────────────────────────────────────────────────────────


def translate_words(script: Script) -> None:
    """Put a session's words in place of the peer's, or say at the line what there is instead."""
    for node in list(ast.walk(script.source.tree)):
        if isinstance(node, ast.With):
            _translate_context(script, node)
        elif isinstance(node, ast.Call):
            _translate_call(script, node)
        elif isinstance(node, ast.Attribute) and _is_device_of_engine(script, node):
            script.source.replace(node, ATTRIBUTES["device"])
        elif isinstance(node, ast.Attribute) and script.is_handle(node.value):
            parent = script.source.parents[node]
            is_called = isinstance(parent, ast.Call) and parent.func is node
            if not is_called and node.attr in ATTRIBUTES:
                script.source.replace(node, ATTRIBUTES[node.attr])
            elif not is_called and node.attr != "sync_gradients":
                script.say(node, _no_counterpart(script, node))


def _is_device_of_engine(script: Script, node: ast.Attribute) -> bool:
    return (
        isinstance(node.value, ast.Name) and node.value.id in script.engines and node.attr in ("device", "local_rank")
    )


def _translate_context(script: Script, node: ast.With) -> None:
    for item in node.items:
        call = item.context_expr
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and script.is_handle(call.func.value):
            if call.func.attr in CONTEXTS:
                script.source.replace(call, CONTEXTS[call.func.attr])
            elif call.func.attr in UNWRAPPED and len(node.items) == 1 and not _has_backward(node):
                indent = script.source.indent_of(node)
                lines = script.source.block(node.body).splitlines(keepends=True)
                script.source.replace_lines([node], "".join(indent + line if line.strip() else line for line in lines))


def _has_backward(node: ast.AST) -> bool:
    return any(called(part) == "backward" for part in ast.walk(node))


def _translate_call(script: Script, call: ast.Call) -> None:
    source, statement = script.source, script.source.statement_of(call)
    is_statement = isinstance(statement, ast.Expr) and statement.value is call
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        owner, word = function.value.id, function.attr
        if owner in script.samplers and word == "set_epoch" and is_statement:
            source.remove(statement)
            return
        if owner in script.handles | script.engines:
            _translate_method(script, call, word, statement, is_statement)
            return
    what = resolve(function, script.imports)
    if what in FUNCTIONS:
        text = FUNCTIONS[what]
        if text is not None:
            source.replace(call, _filled(script, text, call))
        elif is_statement:
            script.say(statement, ADVICE.get(what, ""))
            source.remove(statement)
    elif what.startswith("torch.distributed.") and what != SAMPLER:
        script.say(call, f"{what} has no counterpart: ranks of a session talk through state.gather, evaluate and step")
    if any(keyword.arg == "sampler" for keyword in call.keywords):
        _translate_loader(script, call)


def _translate_method(script: Script, call: ast.Call, word: str, statement: ast.stmt, is_statement: bool) -> None:
    source = script.source
    if word in (
        "backward",
        "step",
        "train",
        "eval",
        "clip_grad_norm_",
        "clip_gradients",
        *SETUPS,
        *CONTEXTS,
        *UNWRAPPED,
    ):
        return  # of the loop, of the setup, or a context
    if word in DROPPED and is_statement:
        script.say(statement, DROPPED[word])
        source.remove(statement)
    elif word == "print":
        source.replace(call.func, "session.print")
    elif word in CALLS:
        script.say(call, WORTH_SAYING.get(SAME_SAYING.get(word, word), ""))
        source.replace(call, _filled(script, CALLS[word], call))
    elif not (isinstance(call.func, ast.Attribute) and script.is_handle(call.func.value)):
        return  # the engine's own module
    else:
        script.say(call, _no_counterpart(script, call.func))


def _no_counterpart(script: Script, node: ast.AST) -> str:
    word = node.attr if isinstance(node, ast.Attribute) else "this"
    return f"{word} has no counterpart: {ADVICE.get(word, 'see docs/guides/coming-from.md')}"


def _filled(script: Script, template: str, call: ast.Call) -> str:
    """A template with the call's arguments."""
    arguments = [script.source.rendered(argument) for argument in [*call.args, *(k.value for k in call.keywords)]]
    return template.replace("{0}", arguments[0] if arguments else "")


def _translate_loader(script: Script, call: ast.Call) -> None:
    """A loader of a process's share becomes that of the global batch."""
    for keyword in call.keywords:
        value = keyword.value
        is_inline = isinstance(value, ast.Call) and resolve(value.func, script.imports) == SAMPLER
        is_named = isinstance(value, ast.Name) and value.id in script.samplers
        if keyword.arg == "sampler" and (is_inline or is_named):
            sampler = value if isinstance(value, ast.Call) else _sampler_call(script, value)
            shuffle = keyword_of(sampler, "shuffle") if sampler is not None else None
            start, end = script.source.span(value)
            text = script.source.rendered(shuffle) if shuffle is not None else "True"
            script.source.replace_between(start - len("sampler="), end, f"shuffle={text}")
        if keyword.arg == "shuffle" and any(k.arg == "sampler" for k in call.keywords):
            start, end = script.source.span(value)
            script.source.replace_between(start - len("shuffle="), end, "drop_last=False")


def _sampler_call(script: Script, name: ast.expr) -> ast.Call | None:
    for node in ast.walk(script.source.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(name, ast.Name):
            is_it = any(isinstance(target, ast.Name) and target.id == name.id for target in node.targets)
            if is_it and resolve(node.value.func, script.imports) == SAMPLER:
                return node.value
    return None
