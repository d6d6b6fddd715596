"""What an optimiser keeps for each parameter, in a checkpoint that any number of ranks can load.

A stack of experts is one parameter to the optimiser. If a state has one part for each expert, it is
saved expert by expert. The shape alone does not tell: with one expert [1, 8] may be the expert's
state or a mean over all experts, and an [L, L] matrix between L experts has L rows too. So the
optimiser's first step is tried on stacks of zeros with 2 and with 3 experts, and the shapes are
compared.

A record beside the states lists which there are: a parameter that was never moved has none, and
loading zeros instead would change later steps (momentum with dampening, NAdam's product).
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer, SparseAdam

State = dict[str, Any]  # of one parameter
_MIXED = "which is not made of one part an expert, so that other ranks cannot load it"
_NUMBERS = (int, float, str, type(None))  # what a record holds as it is; bool is an int
_REFUSED = {
    "LBFGS": "one history of all parameters together, which cannot be taken apart by expert",
    "ZeroRedundancyOptimizer": "each state on one rank, where others cannot see it",
}
# By optimiser: states that are not saved, since every step computes them before it reads them. They
# belong to a whole stack, so other ranks could not use them.
_SCRATCH = {
    "transformers.optimization.Adafactor": {"RMS"},
    "pytorch_optimizer.optimizer.lamb.Lamb": {"weight_norm", "adam_norm", "trust_ratio"},
}


def optimiser_entries(
    optimizer: Optimizer, names: Mapping[Tensor, str], experts_of: Mapping[Tensor, list[int]]
) -> State:
    """The tensors to save, by name, and for each parameter the object that installs them after a
    load.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner  # of a wrapper, as accelerate's
    kind = type(optimizer).__name__
    for base in type(optimizer).__mro__:
        if base.__name__ in _REFUSED:
            raise ValueError(f"{kind} keeps {_REFUSED[base.__name__]}: want another optimiser")
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for one in [*parameters, *optimizer.state]:
        if not isinstance(one, Tensor):
            raise ValueError(f"{kind} keeps {one!r} for all parameters together, want states each")
        if one not in names:
            raise ValueError(
                f"{kind} has a parameter {list(one.shape)} that is not in the module: want the "
                "module that has all its parameters"
            )
    entries: State = {}
    makers: dict[Any, _Stack] = {}
    restored: dict[int, State] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            experts = experts_of.get(parameter)
            stack = None
            if experts is not None and (parameter.requires_grad or parameter in optimizer.state):
                key = (number, parameter.shape[1:], parameter.dtype, parameter.device)
                if key not in makers:
                    makers[key] = _Stack(optimizer, group, parameter, names[parameter])
                stack = makers[key]
            kept = _Kept(optimizer, group, parameter, names[parameter], experts, stack, restored)
            entries |= kept.tensors()
            entries[kept.name] = kept
    return entries


def states_by_expert(
    optimizer: Optimizer, parameter: Tensor, name: str
) -> tuple[list[str], dict[str, Any]]:
    """The states of a stack that have one part for each expert, and the numbers that all of its
    experts have in common. Raises ValueError if another state belongs to no single expert.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    there = optimizer.state.get(parameter, {})
    group = next(
        (one for one in optimizer.param_groups if any(parameter is two for two in one["params"])),
        None,
    )
    if group is None or not there:
        return [], {}
    stack = _Stack(optimizer, group, parameter, name)
    kept = _Kept(optimizer, group, parameter, name, list(range(len(parameter))), stack, {})
    return kept.taken_apart()


def split(name: str, stack: Tensor, experts: list[int]) -> dict[str, Tensor]:
    """Each expert's part of a stack, by its global id; that of its first copy here."""
    return {f"{name}.{expert}": stack[experts.index(expert)] for expert in dict.fromkeys(experts)}


def fill_copies(stack: Tensor, experts: list[int]) -> None:
    """Give what was loaded into the first copy of each expert to its other copies here."""
    for local, expert in enumerate(experts):
        if local != experts.index(expert):
            stack[local].copy_(stack[experts.index(expert)])


class _Kept:
    """One parameter's states: a Stateful of torch.distributed.checkpoint."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: State,
        parameter: Tensor,
        name: str,
        experts: list[int] | None,  # that the parameter stacks; None if it is dense
        stack: _Stack | None,
        restored: dict[int, State],  # options by group, for all parameters of a load
    ) -> None:
        self.name = f"optimizer.{name}"
        self._optimizer, self._group, self._parameter = optimizer, group, parameter
        self._experts, self._stack, self._restored = experts, stack, restored
        scratch = _SCRATCH.get(f"{type(optimizer).__module__}.{type(optimizer).__name__}", set())
        there = optimizer.state.get(parameter, {})
        self._there = {key: value for key, value in there.items() if key not in scratch}
        self._room = self._there
        if not there and parameter.requires_grad:
            first = _first_states(optimizer, group, parameter) if stack is None else stack.states
            self._room = {
                key: _zeros(value, stack is not None and key in stack.by_expert, experts)
                for key, value in first.items()
                if key not in scratch
            }
        for key, value in self._room.items():
            if not isinstance(value, (Tensor, *_NUMBERS)):
                self._refuse(
                    key, f"a {type(value).__name__}", "and only tensors and numbers are saved"
                )
            if stack is not None and isinstance(value, Tensor):
                self._check(stack, key, value)
        # What all experts of a stack have in common is saved with each of them. A rank without
        # experts shares it too, since some may come to it later: it has expert 0's.
        self._sharing = sorted(set(experts or [0]))
        self._common = {
            key: [value.clone() for _ in self._sharing]
            for key, value in self._room.items()
            if experts is not None and isinstance(value, Tensor) and not self._is_by_expert(key)
        }
        self._records = self._make_records()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, and to load into."""
        found: dict[str, Tensor] = {}
        for key, value in self._room.items():
            if not isinstance(value, Tensor):
                continue
            if self._experts is None:
                found[f"{self.name}.{key}"] = value
            elif self._is_by_expert(key):
                found |= split(f"{self.name}.{key}", value, self._experts)
            else:
                copies = zip(self._sharing, self._common[key])
                found |= {f"{self.name}.{key}.{expert}": one for expert, one in copies}
        return found

    def taken_apart(self) -> tuple[list[str], dict[str, Any]]:
        """The names of the states with one part for each expert; and the other states, by name."""
        by_expert = [key for key in self._there if self._is_by_expert(key)]
        rest = {key: one for key, one in self._there.items() if key not in by_expert}
        return by_expert, {
            k: one.item() if isinstance(one, Tensor) else one for k, one in rest.items()
        }

    def state_dict(self) -> dict[str, str]:
        return dict(self._records)

    def load_state_dict(self, records: dict[str, str]) -> None:
        """Let the optimiser have what was loaded, if it was there when the checkpoint was saved."""
        if all(records[key] is mine for key, mine in self._records.items()):
            return  # nothing came, as with allow_partial_load
        if len(set(records.values())) > 1:
            raise ValueError(
                f"{self.name}: experts that live on one rank now were saved in different states: "
                + " and ".join(sorted(set(records.values()))[:2])
            )
        record = json.loads(next(iter(records.values())))
        unread = [key for key in record["tensors"] if key not in self._room]
        if unread:
            raise ValueError(
                f"{self.name}.{unread[0]} is in the checkpoint, and "
                f"{type(self._optimizer).__name__} has no place for it: want an optimiser with the "
                "options, and parameters with the requires_grad, that they were saved with; or to "
                "load after a first step, where states are made later"
            )
        for key in set(record["tensors"]) & self._common.keys():
            one, *others = self._common[key]
            if not all(torch.equal(one, other) for other in others):
                self._refuse(key, "a number", "which was another for other experts of this rank")
            self._room[key].copy_(one)
        for key in record["tensors"]:
            if self._is_by_expert(key):
                fill_copies(self._room[key], self._experts or [])
        state = {key: self._room[key] for key in record["tensors"]} | record["numbers"]
        if state:
            kept = self._optimizer.state[self._parameter]
            kept.clear()
            kept.update(state)
        else:
            self._optimizer.state.pop(self._parameter, None)
        self._restore(record["options"])

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.name} cannot be pickled: want the entries of checkpoint_state at the top of "
            "the dict that torch.distributed.checkpoint gets"
        )

    def _make_records(self) -> dict[str, str]:
        record = json.dumps(
            {
                "tensors": [key for key, one in self._there.items() if isinstance(one, Tensor)],
                "numbers": {
                    key: one for key, one in self._there.items() if not isinstance(one, Tensor)
                },
                "options": _options(self._group),
            }
        )
        if self._experts is None:
            return {"record": record}
        return {f"record.{expert}": record for expert in self._sharing}

    def _restore(self, options: State) -> None:
        before = self._restored.setdefault(id(self._group), options)
        for key, value in options.items():
            if before.get(key) != value:
                raise ValueError(
                    f"{self.name} was saved with {key}={value}, and another parameter of its group "
                    f"with {before.get(key)}: want the groups that it was saved with"
                )
            now = self._group.get(key)
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                self._group[key] = tuple(value) if isinstance(now, tuple) else value

    def _is_by_expert(self, key: str) -> bool:
        return self._stack is not None and key in self._stack.by_expert

    def _check(self, stack: _Stack, key: str, value: Tensor) -> None:
        """Refuse a state, unless it has one part for each expert or is one number."""
        shape = tuple(value.shape)
        if key in stack.by_expert:
            assert self._experts is not None
            good = shape == (len(self._experts), *stack.by_expert[key])
        else:
            good = value.numel() == 1 and (key not in stack.states or key in stack.common)
        if not good:
            self._refuse(key, str(list(shape)), _MIXED)

    def _refuse(self, key: str, what: str, why: str) -> NoReturn:
        _refuse(self._optimizer, key, what, self.name.removeprefix("optimizer."), why)


class _Stack:
    """What the first step makes for a stack of experts."""

    def __init__(self, optimizer: Optimizer, group: State, parameter: Tensor, name: str) -> None:
        few, more = (
            _first_states(optimizer, group, parameter.new_zeros(number, *parameter.shape[1:]))
            for number in (2, 3)
        )
        self.states = few
        self.by_expert: dict[str, tuple[int, ...]] = {}  # the shape of one expert's part
        self.common: set[str] = set()
        for key, one in few.items():
            if not isinstance(one, Tensor):
                continue
            shape, other = tuple(one.shape), tuple(getattr(more.get(key), "shape", ()))
            if shape[:1] == (2,) and other == (3, *shape[1:]):
                self.by_expert[key] = shape[1:]
            elif shape == other and one.numel() == 1:
                self.common.add(key)
            else:
                _refuse(optimizer, key, f"{list(shape)} for 2 experts", name, _MIXED)


def _refuse(optimizer: Optimizer, key: str, what: str, name: str, why: str) -> NoReturn:
    raise ValueError(
        f"{type(optimizer).__name__} keeps {key}, {what}, of {name}, {why}: want another optimiser "
        "for this parameter"
    )


def _zeros(value: Any, by_expert: bool, experts: list[int] | None) -> Any:
    """Zeros to load into: shapes as after the first step, with as many experts as there are."""
    if not isinstance(value, Tensor):
        return value
    if by_expert and experts is not None:
        return value.new_zeros(len(experts), *value.shape[1:])
    return torch.zeros_like(value)


def _first_states(optimizer: Optimizer, group: State, like: Tensor) -> State:
    """What the optimiser's first step makes for a parameter, tried on another one."""
    parameter = nn.Parameter(torch.zeros_like(like))
    gradient = torch.ones_like(parameter)
    sparse = isinstance(optimizer, SparseAdam)
    parameter.grad = gradient.to_sparse(1) if sparse else gradient
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    groups = [{**copy.deepcopy(options), "params": [parameter]}]
    try:
        if isinstance(optimizer, Adagrad):  # makes states when it is made
            trial: Optimizer = type(optimizer)(groups)
        else:
            trial = _twin(optimizer, groups)
        type(trial).step(trial)
    except Exception as error:
        raise ValueError(
            f"a step of {type(optimizer).__name__}, tried on a parameter {list(like.shape)} to see "
            f"what it keeps, failed: {error}"
        ) from error
    return dict(trial.state[parameter])


def _twin(optimizer: Optimizer, groups: list[State]) -> Optimizer:
    """An optimiser with the same attributes but other parameters, without states and hooks.

    copy.copy would lose what a subclass adds, and would keep the `step` that a schedule has set on
    the instance, which steps the original.
    """
    twin = object.__new__(type(optimizer))
    hooks: State = {key: OrderedDict() for key in vars(optimizer) if key.endswith("_hooks")}
    vars(twin).update({**vars(optimizer), **hooks})
    vars(twin).pop("step", None)
    vars(twin).update(state=defaultdict(dict), param_groups=groups)
    return twin


def _options(group: State) -> State:
    """The numbers of a parameter group."""
    found: State = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            found[key] = value.item()
        elif isinstance(value, _NUMBERS):
            found[key] = value
        elif isinstance(value, (tuple, list)) and all(isinstance(one, _NUMBERS) for one in value):
            found[key] = list(value)
    return found
