"""The `.metadata` of torch's distributed checkpoints (DCP), read without unpickling it.

The file is a pickle, which could name any function and have it called.  Here its operations are followed one by one,
and only those that plain data and records need.  A class is a name, and an object of it a record of what it was given:
nothing is looked up, imported or called.  An operation or a name that DCP does not write is refused.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import Any

from weft.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_FILE_SYSTEM = "torch.distributed.checkpoint.filesystem"
_CLASSES = frozenset(
    (
        *(f"{_METADATA}.{name}" for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
        *(f"{_METADATA}.{name}" for name in ("TensorProperties", "ChunkStorageMetadata", "MetadataIndex")),
        *(f"{_METADATA}.{name}" for name in ("_MEM_FORMAT_ENCODING", "StorageMeta")),
        *(f"{_FILE_SYSTEM}.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
        *("torch.serialization._get_layout", "torch.Size", "collections.OrderedDict"),
        *(f"pathlib.{name}" for name in ("PosixPath", "PurePosixPath", "Path")),
        *("pathlib._local.PosixPath", "pathlib._local.PurePosixPath"),
        *(f"torch.{name}" for name in ("float64", "float32", "float16", "bfloat16", "bool", "uint8")),
        *(f"torch.{name}" for name in ("int64", "int32", "int16", "int8", "complex64", "complex128")),
    )
)
"""Everything that DCP names in a file of tensors and plain values."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES"),
    )
)
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_LARGEST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class NamedClass:
    """A class or function that the file names; never the thing itself."""

    name: str


@dataclass(slots=True, eq=False)
class DescribedObject:
    """An object that the file describes."""

    kind: str
    arguments: tuple[Any, ...]
    state: dict[str, Any] = field(default_factory=dict[str, Any])

    def get(self, name: str) -> Any:
        """Return an attribute; None where there is none."""
        return self.state.get(name)


def read_metadata(content: bytes, where: str) -> DescribedObject:
    """Return what the file describes.

    Args:
        content: of the file.
        where: its path, for messages.

    Raises:
        CheckpointError: it is damaged, or holds what DCP does not write.
    """
    if len(content) > _LARGEST_BYTES:
        raise CheckpointError(f"{where} has {len(content):,} bytes, and at most {_LARGEST_BYTES:,} are read.")
    reader = _Reader(where)
    try:
        for operation, argument, _ in pickletools.genops(content):
            reader.follow(operation.name, argument)
    except CheckpointError:
        raise
    except Exception as problem:  # a damaged file may end anywhere, and find the stack in any state
        raise CheckpointError(f"{where} cannot be read: {type(problem).__name__}: {problem}. It is damaged.") from None
    result = reader.result
    if not isinstance(result, DescribedObject) or result.kind != f"{_METADATA}.Metadata":
        raise CheckpointError(f"{where} does not describe a distributed checkpoint of torch.")
    return result


class _Reader:
    """Follows the operations of a pickle on a stack of plain values and records."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self.result: Any = None

    def follow(self, name: str, argument: Any) -> None:
        """Do one operation.  Raises `CheckpointError` for one that DCP does not write."""
        stack = self._stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            stack.append(argument)
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(self._above_mark()))
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "STOP":
            self.result = stack.pop()
        elif name == "GLOBAL":
            stack.append(self._named(".".join(argument.split(" ", 1))))
        else:
            self._make(name)

    def _make(self, name: str) -> None:
        """Operations that name classes, make objects and fill containers."""
        stack = self._stack
        if name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(self._named(f"{module}.{attribute}"))
        elif name in ("NEWOBJ", "REDUCE"):
            arguments, made = stack.pop(), stack.pop()
            if not isinstance(made, NamedClass) or not isinstance(arguments, tuple):
                raise self._refused(f"a call of a {type(made).__name__}")
            stack.append(_made(made.name, tuple(arguments)))
        elif name == "BUILD":
            state, target = stack.pop(), stack[-1]
            if not isinstance(target, DescribedObject):
                raise self._refused(f"a state of a {type(target).__name__}")
            target.state = dict(state) if isinstance(state, dict) else {"": state}
        elif name in ("SETITEM", "SETITEMS"):
            items = self._above_mark() if name == "SETITEMS" else [stack.pop() for _ in range(2)][::-1]
            # A tuple as key is hashed, which takes for ever where tuples are nested in one another.
            if any(not isinstance(key, str | int | DescribedObject) for key in items[::2]):
                raise self._refused("a key that is neither text nor record")
            self._container(dict).update(zip(items[::2], items[1::2], strict=True))
        elif name in ("APPEND", "APPENDS"):
            items = self._above_mark() if name == "APPENDS" else [stack.pop()]
            self._container(list).extend(items)
        else:
            raise self._refused(f"the operation {name}")

    def _named(self, name: str) -> NamedClass:
        if name not in _CLASSES:
            raise self._refused(f"the name {name:.80}")
        return NamedClass(name)

    def _container(self, kind: type[Any]) -> Any:
        if type(self._stack[-1]) is not kind:
            raise self._refused(f"items of a {type(self._stack[-1]).__name__}")
        return self._stack[-1]

    def _above_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _refused(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._where} holds {what}, which no distributed checkpoint of torch needs. It is damaged, or was made to"
            " run code. Nothing of it was run."
        )


def _made(name: str, arguments: tuple[Any, ...]) -> Any:
    if name == "torch.Size":
        return tuple(arguments[0])
    if name == "collections.OrderedDict":
        return dict(arguments[0]) if arguments else {}
    return DescribedObject(name, arguments)
