"""What a prepared model, its parameters and its optimizer say of what they refuse: by who writes the steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardWords:
    """Errors: each says what would be wrong, and the line to write."""

    step: str
    """What the optimizer's own step says."""
    backward: str
    """What a backward says that reaches the model by itself."""
    forward: str
    """What a forward says that would lead to one, where weights are gathered for each."""
    untrained: str
    """What a step says while gradients are switched off."""
    optimizer_state: str
    optimizer_load: str
    model_state: str
    model_load: str


_WRITE = "Write `state.step(batch)` in place of the forward, loss.backward(), clipping and optimizer.step()"
STEPS = GuardWords(
    step="optimizer.step() of an optimizer that session.prepare was given would change no weight: gradients are reduced"
    f" and applied by the session. {_WRITE}.",
    backward="backward() has reached parameters of a model that session.prepare was given, outside its step: this"
    f" gradient would be lost. {_WRITE}; where the model is the fixed side of another's loss, write it inside `with"
    " state.frozen():`; where only its outputs are wanted, inside `with torch.no_grad():`.",
    forward="a forward outside a step records gradients, which this plan (ZeRO-3) would lose. Write"
    " `state.step(batch)` in place of the forward, loss.backward(), clipping and optimizer.step(); where only outputs"
    " are wanted, call the model inside `with torch.no_grad():`; as the fixed side of another model's loss inside"
    " `with state.frozen():`.",
    untrained="state.step() was called inside torch.no_grad() or torch.inference_mode(), where nothing can train. Call"
    " it outside; state.evaluate(loader) is for losses alone.",
    optimizer_state="optimizer.state_dict() would hold this rank's share of the states only. Write `state.save()`,"
    " which saves model, optimizer and place in the data for any plan.",
    optimizer_load="optimizer.load_state_dict() cannot fill this rank's share of the states. Write `state.load(path)`"
    " for what state.save() has written.",
    model_state="this plan cuts the model, so state_dict() and save_pretrained() would hold this rank's share of the"
    " weights only. Write `state.export(folder)` on every rank: it writes the whole model, as transformers loads it.",
    model_load="load_state_dict() after session.prepare would be lost with the next step: the weights that train lie"
    " elsewhere. Load before prepare, or write `state.load(path)` for what state.save() has written.",
)
"""Words for a loop whose steps are `state.step` and `state.manual_step`."""

_STATE = "state = session.state(model)"
OWN_STEPS = GuardWords(
    step="optimizer.step() was reached past the object that session.prepare was given. Call it as"
    " `optimizer.step()` of that object.",
    backward="backward() has reached a model that session.prepare was given by itself, so that its gradient would not"
    " be weighted by this rank's samples. Write `session.backward(loss)` in place of `loss.backward()`; where only the"
    " model's outputs are wanted, call it inside `with torch.no_grad():`.",
    forward="a forward after session.close() records gradients that nobody would reduce. Call the model before, or"
    " inside `with torch.no_grad():`.",
    untrained="session.backward() was called inside torch.no_grad() or torch.inference_mode(), where nothing can"
    " train. Call it outside.",
    optimizer_state="optimizer.state_dict() would hold this rank's share of the states only. Write"
    " `session.save(folder)`, which saves all that was prepared for any plan.",
    optimizer_load="optimizer.load_state_dict() after the model's first forward cannot fill this rank's share of the"
    " states. Write `session.load(folder)` for what session.save() has written.",
    model_state="this plan cuts the model, so state_dict() and save_pretrained() would hold this rank's share of the"
    f" weights only. Write `{_STATE}` and `state.export(folder)` on every rank: it writes the whole model, as"
    " transformers loads it.",
    model_load="load_state_dict() after the model's first forward would be lost with the next step: the weights that"
    " train lie elsewhere. Load before it, or write `session.load(folder)` for what session.save() has written.",
)
"""Words for a loop that keeps its own forward, loss and optimizer.step()."""
