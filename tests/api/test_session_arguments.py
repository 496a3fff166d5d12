"""Arguments that a session, `prepare` and a state's methods cannot use: each is refused where it is given, with what
to write; nothing is taken in silence, and the state goes on."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_session_traps import BATCH, build, loss_fn, plan_for, prepared, samples, session_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

import weft
from weft.errors import WeftError

SESSIONS: dict[str, tuple[dict[str, Any], str]] = {
    "precisions as one text": ({"permit": "bf16"}, r"permit = 'bf16' is one text.*Write permit=\('bf16',\)"),
    "no list of precisions": ({"permit": 3}, "permit = 3 is no list of names"),
    "no precisions": ({"permit": ()}, r"precision = \[\] is empty"),
    "compressions as one text": ({"compression": "int8"}, r"Write compression=\('int8',\)"),
    "compressions of nothing": ({"compression": None}, "compression = None is no list"),
    "settings in a list": ({"settings": []}, r"settings=…\) is a list. Give a dictionary"),
    "settings as a text": ({"settings": "compute.compile"}, "is a str. Give a dictionary"),
    "a setting without a name": ({"settings": {3: 4}}, "the key 3 is a int"),
    "an empty setting": ({"settings": {"": 4}}, '"" is not a setting'),
    "a whole section": ({"settings": {"compute": {"compile": False}}}, r'\{"compute.compile": …\}'),
    "half a thread": ({"settings": {"compute.threads_per_rank": 1.5}}, "1.5 is not a whole number"),
    "a folder without a name": ({"folder": ""}, r'folder=…\) = "" names nothing'),
    "a folder that is a number": ({"folder": 3}, "= 3 is no path"),
    "a folder with a NUL": ({"folder": "a\0b"}, "is no path. Give one as a text without NUL"),
    "a folder that is a file": ({"folder": "file.txt"}, "file.txt is a file, and a run needs a folder"),
    "a file where nothing is recorded": ({"folder": "file.txt", "record": False}, "file.txt is a file"),
    "a folder below a file": ({"folder": "file.txt/x"}, "cannot be made: Not a directory"),
    "a folder with a long name": ({"folder": "a" * 5000}, "cannot be made: File name too long"),
    "a folder that leads to itself": ({"folder": "loop"}, "the run folder loop cannot be made"),
    "a record that is no switch": ({"record": "no"}, "record = 'no' is neither True nor False"),
    "a quiet that is no switch": ({"quiet": None}, "quiet = None is neither"),
    "a track that cannot be called": ({"track": "runs"}, "track = 'runs' cannot be called"),
    "a device of torch": ({"device": torch.device("cpu")}, 'Give "auto" or "cpu" or "cuda"'),
    "no device": ({"device": ""}, "device=….*'' is no device"),
    "half a seed": ({"seed": 1.5}, "seed = 1.5 is no seed"),
    "a seed beyond 64 bits": ({"seed": 2**80}, "64 bits"),
    "a wait without end": ({"collective_timeout_seconds": math.inf}, "finite number above 0"),
    "a wait in words": ({"collective_timeout_seconds": "3"}, "Write 3.0, without quotes"),
    "a plan that is a dictionary": ({"plan": {}}, "is no plan"),
    "half an accumulation": ({"plan": "auto", "microbatches": 1.5}, "= 1.5 is no number of microbatches"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("file.txt").touch()
    Path("loop").symlink_to("loop")
    Path("full").mkdir()
    Path("full", "x").touch()
    return tmp_path


def is_refused(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(WeftError) as caught:
        call()
    text = str(caught.value)
    assert caught.value.status == 2
    assert re.search(match, text), text
    assert len(text.splitlines()) <= 15
    assert caught.value.lines_of_user()


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_is_not_begun(place: Path, name: str) -> None:
    given, match = SESSIONS[name]

    def begin() -> None:
        usual: dict[str, Any] = {"plan": plan_for(1), "permit": ("fp64",), "folder": place / "run", "quiet": True}
        with weft.session(**usual | given) as session:
            prepared(session, build())

    is_refused(begin, match)


def of_outputs(outputs: Tensor) -> Tensor:
    return outputs.sum()


def scheduler() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(build().parameters(), lr=0.1), 1)


class Wide(nn.Module):
    """Takes any arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.inner(x)


LIST = [[torch.ones(BATCH, 6), torch.ones(BATCH, 4)]]
PREPARED: dict[str, tuple[dict[str, Any], str]] = {
    "a class as model": ({"model": nn.Linear}, "the class Linear. Give an instance"),
    "a function as model": ({"model": loss_fn}, "a function, the model, an nn.Module, comes first"),
    "no optimizer": ({"optimizer": 3}, "is int, not an optimizer"),
    "a class as optimizer": ({"optimizer": torch.optim.SGD}, "is SGD, not an optimizer. Give one of torch.optim, made"),
    "a scheduler as optimizer": ({"optimizer": scheduler()}, "Give scheduler.optimizer"),
    "no loader": ({"loader": 3}, "int does not say its batch_size"),
    "batches without their size": ({"loader": LIST}, "list does not say its batch_size"),
    "a loss of outputs alone": ({"loss": of_outputs}, r"called with \(outputs, batch\)"),
    "a loss of torch": ({"loss": nn.MSELoss()}, r"MSELoss takes \(outputs, targets\).*loss_fn\(outputs, batch\[1\]\)"),
    "a function of torch": ({"loss": nn.functional.mse_loss}, r"mse_loss takes \(outputs, targets\)"),
    "inputs in a list": ({"inputs": ["input"]}, r'inputs=\{argument of forward: field\}, such as \{"x": "0"\}'),
    "inputs of another argument": ({"inputs": {"inptu": "0"}}, "names 'inptu'.*Did you mean input"),
    "inputs of another field": ({"inputs": {"input": "7"}}, "takes '7' for input.*it has 0, 1"),
    "inputs by number": ({"inputs": {"input": 0}}, r'takes 0 for input.*\{"input": "0"\}'),
    "inputs of any arguments": ({"model": Wide(), "inputs": {"x y": "0"}}, "names 'x y', which cannot be an argument"),
    "a split in words": ({"split": "column"}, "split = 'column' is no table"),
    "a split of another kind": ({"split": {"0": "colum"}}, "'colum', which is no way of it. Did you mean column"),
    "a split of nothing": ({"split": {"layers.*": "column"}}, '"layers.*" matches no module of the model'),
    "a split of texts": ({"split": ["0"]}, "split holds '0'"),
    "a cut that is none": ({"cut": {"entry": "0"}}, "is no CutTable"),
    "a head that is not there": ({"vocabulary_head": "had"}, "'had' names no module of the Sequential"),
    "a head without a name": ({"vocabulary_head": ""}, "'' names no module"),
    "a norm of nothing": ({"max_grad_norm": 0}, "max_grad_norm = 0.0 must be a finite number above 0"),
    "a norm that is no number": ({"max_grad_norm": math.nan}, "max_grad_norm = nan is not a number"),
    "another batch size": ({"batch_size": 4}, "batch_size = 4 is for loaders that do not say it.*batch_size = 8"),
    "half a sample": ({"loader": LIST, "batch_size": 1.5}, "1.5 is not a whole number"),
    "no samples": ({"loader": LIST, "batch_size": 0}, "0 is too small"),
}


@pytest.mark.parametrize("name", PREPARED)
def test_a_model_is_not_prepared(place: Path, name: str) -> None:
    given, match = PREPARED[name]
    model = build()
    given = {**given}
    model, optimizer = given.pop("model", model), given.pop("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    with session_of("run") as session:
        loader = given.pop("loader", None)
        is_refused(lambda: prepared(session, model, loader, optimizer=optimizer, **given), match)


LOSSES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a row for each sample": (lambda o: o, r"a tensor of shape \(8, 4\).*Return \(sum, count\)"),
    "a number of Python": (lambda o: 3.0, "returned a float"),
    "a pair of such": (lambda o: (3.0, 8), "returned a float"),
    "nothing": (lambda o: None, r"returned None. Return \(sum, count\)"),
    "a dictionary": (lambda o: {"loss": o.sum()}, "returned a dict"),
    "three things": (lambda o: (o.sum(), 8, 1), "returned 3 values"),
    "no gradient": (lambda o: (o.sum().detach(), 8), "does not depend on what the model computed"),
    "complex numbers": (lambda o: (o.sum() * 1j, 8), "torch.complex128"),
    "a count below none": (lambda o: (o.sum(), -3), "-3 as its count"),
    "a count that is no number": (lambda o: (o.sum(), math.nan), "nan as its count"),
    "a count in words": (lambda o: (o.sum(), "8"), "'8' as its count"),
    "many counts": (lambda o: (o.sum(), torch.ones(3)), "as its count"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_none_is_not_trained_on(place: Path, name: str) -> None:
    make, match = LOSSES[name]

    def loss(outputs: Tensor, batch: Any) -> Any:
        return make(outputs)

    with session_of("run") as session:
        state = prepared(session, build(), loss=loss)
        is_refused(lambda: state.step(next(state.batches())), match)
        assert state.steps == 0


def evaluated(metrics: Any, **more: Any) -> Callable[[Any], Any]:
    return lambda state: state.evaluate(DataLoader(samples(6), batch_size=4), metrics, **more)


def nothing(predictions: Tensor, targets: Tensor) -> int:
    return 0


class Attached:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "batches of half a step": (lambda state: state.batches(1.5), "steps=….*1.5 is no number of them"),
    "batches below none": (lambda state: state.batches(-1), "-1 is no number"),
    "batches in words": (lambda state: state.batches("2"), "'2' is no number"),
    "batches that are true": (lambda state: state.batches(True), "True is no number"),
    "a step on nothing": (lambda state: state.step(None), "the batch is a NoneType"),
    "a step on a number": (lambda state: state.step(3), "the batch is a int"),
    "a step on an empty batch": (lambda state: state.step({}), "the batch is empty"),
    "a step on a text": (lambda state: state.step("ab"), "the batch is a str"),
    "a step on too few": (lambda state: state.step([torch.ones(3, 6), torch.ones(3, 4)]), "and the batch has 3"),
    "half an epoch": (lambda state: state.epochs(1.5), r"state\.epochs\(1.5\) is no number of epochs"),
    "epochs of nothing": (lambda state: state.epochs(None), r"state\.epochs\(None\)"),
    "an evaluation of nothing": (
        lambda state: state.evaluate(None),
        "the loader is a NoneType, which yields no batches",
    ),
    "an evaluation of the state": (lambda state: state.evaluate(state), "the loader is a TrainState"),
    "an evaluation of no batch": (lambda state: state.evaluate([]), "gave no batch"),
    "metrics in a list": (evaluated(["accuracy"]), "metrics is a list. Give a dictionary"),
    "a metric alone": (evaluated(nothing), "metrics is a function"),
    "a metric without a name": (evaluated({"": nothing}), "a metric is called ''"),
    "a metric with a number": (evaluated({3: nothing}), "a metric is called 3"),
    "a metric's class": (evaluated({"a": dict}), "is the class dict"),
    "a metric that is the loss": (evaluated({"loss": nothing}), 'called "loss"'),
    "outputs that are none": (evaluated({"a": nothing}, outputs=3), "outputs = 3 cannot be called"),
    "outputs for no metric": (evaluated(None, outputs=nothing), "and there are none. Give metrics="),
    "predictions of nothing": (lambda state: state.predict(None), "the loader is a NoneType"),
    "predictions by a number": (lambda state: state.predict([], outputs=3), "outputs = 3 cannot be called"),
    "nothing to gather": (lambda state: state.gather({}), "an empty dict"),
    "an empty list to gather": (lambda state: state.gather([]), "an empty tuple"),
    "a number to gather": (lambda state: state.gather(3), "is a int"),
    "draws below none": (lambda state: state.randn(next(state.batches()), -2), r"-2, which is no size"),
    "draws of half a size": (lambda state: state.rand(next(state.batches()), 1.5), "1.5, which is no size"),
    "draws of a tuple": (lambda state: state.randn(next(state.batches()), (2, 3)), r"state\.randn\(batch, 2, 3\)"),
    "whole numbers up to a half": (lambda state: state.randint(next(state.batches()), 1.5), "the bound 1.5"),
    "whole numbers up to words": (lambda state: state.randint(next(state.batches()), "a"), "the bound 'a'"),
    "whole numbers of 70 bits": (lambda state: state.randint(next(state.batches()), 2**70), "64 bits"),
    "an export to nowhere": (lambda state: state.export(""), 'folder = "" names nothing'),
    "an export to nothing": (lambda state: state.export(None), "None is no path"),
    "an export into a file": (lambda state: state.export("file.txt"), "file.txt is a file, and an export needs"),
    "an export below a file": (lambda state: state.export("file.txt/x"), "Not a directory"),
    "an export into a full folder": (lambda state: state.export("full"), "is not empty"),
    "an export into this folder": (lambda state: state.export("."), "is not empty"),
    "an export to the root": (lambda state: state.export("/"), "the root of all"),
    "a load of nothing": (lambda state: state.load(""), "names nothing"),
    "a load of a number": (lambda state: state.load(3), "3 is no path"),
    "a load of a file": (lambda state: state.load("file.txt"), "file.txt is a file"),
    "a load of what is not there": (lambda state: state.load("nowhere"), "nowhere does not exist"),
    "nothing to attach": (lambda state: state.attach(), r"was given nothing.*state\.attach\(scheduler=scheduler\)"),
    "None to attach": (lambda state: state.attach(a=None), "a is a NoneType"),
    "a class to attach": (lambda state: state.attach(a=Attached), "a is the class Attached"),
    "the model to attach": (lambda state: state.attach(a=state.model), "a is what session.prepare was given"),
    "the optimizer to attach": (lambda state: state.attach(a=state.optimizer), "saves anyway. Leave it out"),
}


def test_a_states_methods_refuse_and_it_goes_on(place: Path) -> None:
    with session_of("run") as session:
        state = prepared(session, build())
        for call, match in CALLS.values():
            is_refused(lambda call=call: call(state), match)
        assert state.step(next(state.batches())).step == 1
        for call, match in CALLS.values():
            is_refused(lambda call=call: call(state), match)
        assert state.step(next(state.batches())).step == 2


def sum_of_squares(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def pair_of_models_loss(outputs: Any, batch: Any) -> Any:
    return outputs.loss * 8, 8


def models_loss(outputs: Any, batch: Any) -> Any:
    return outputs.loss


def test_labels_go_to_a_model_that_cannot_do_without(place: Path) -> None:
    class Wants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.inner(x) - labels

    rows = [{"x": x, "labels": y} for x, y in samples()]
    with session_of("run", plan_for(1)) as session:
        state = prepared(
            session,
            Wants(),
            DataLoader(rows, batch_size=BATCH),  # type: ignore[arg-type]
            loss=sum_of_squares,
        )
        assert state.step(next(state.batches())).loss > 0


@pytest.mark.parametrize("loss", [pair_of_models_loss, models_loss])
def test_a_loss_that_no_labels_made_is_explained(place: Path, loss: Any) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double()
    row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    with session_of("run") as session:
        loader = DataLoader([row] * 16, batch_size=BATCH)  # type: ignore[arg-type]
        state = prepared(session, model, loader, loss=loss)
        is_refused(
            lambda: state.step(next(state.batches())), r'inputs=\{"input_ids": "input_ids", "labels": "labels"\}'
        )
