"""torch.optim.SparseAdam for tables on shards: the shards step, this object collects what they need."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NoReturn, overload

import numpy as np
import torch
from torch.optim import Optimizer

from shardam._gradient import TableGradient
from shardam._module import TableModule
from shardam._parts import TableStepGradient
from shardam._push_checks import check_options, merged_gradient
from shardam.cluster import Cluster
from shardam.collection import EmbeddingCollection
from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import BadOption, MessageTooLarge

HYPER_PARAMETERS = ("lr", "betas", "eps", "maximize", "weight_decay", "decoupled_weight_decay")
"""What a param group may set, and what travels with each push."""

_BOOKKEEPING = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names"})
"""Keys that torch and its schedulers keep in param groups; they stay here."""

Module = TableModule | EmbeddingCollection
"""What has tables: Embedding, EmbeddingBag, EmbeddingCollection."""

ModuleGroup = Mapping[str, object]
"""A param group: "params" (modules) and hyper-parameters of its own."""


class SparseAdam(Optimizer):
    """Steps the tables of modules on their shards, with torch.optim.SparseAdam's arithmetic.

    A table's gradient is what backward has recorded for its modules since zero_grad, merged over all of their uses; a table
    without a gradient does not step. step() queues the push and returns: an error is raised by the next step, pull or
    synchronize. A gradient is pushed once: a second step() without a backward pushes and counts nothing, where torch would
    apply it again. What was queued is sent from the memory of `.grad`, without a copy: after step() read it, write nothing, or
    the next step() or synchronize() says so.
    Clip with `torch.nn.utils.clip_grad_norm_(sparse.parameters(), ...)`; torch.amp.GradScaler works as with
    torch's own optimizers. state_dict() has the hyper-parameters; moments live on the shards.

    In a group (a cluster of mode "sync" or "bounded:N") the other workers count on this one, so each step() sends exactly one
    push, with or without a gradient, and is one step of the group: of two optimizers on one cluster each takes one, and all
    ranks must call step() of the same optimizers in the same order. What is dropped with zero_grad() is said to the group, too.
    Where a step is refused or timed out, every rank gets the error. A module that is only looked at belongs under
    torch.no_grad(): a forward that records a gradient waits for the group's steps.

    Args:
        modules: Embedding, EmbeddingBag and EmbeddingCollection modules, or param groups as in torch: dicts with "params":
            modules and hyper-parameters.
        lr: learning rate, > 0; a scheduler may take it to 0. A tensor of one element is read at each step.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to sqrt(exp_avg_sq).
        maximize: step towards larger loss.
        weight_decay: of rows that a step names; 0 for none.
        decoupled_weight_decay: decay the weight (AdamW) instead of adding weight_decay * weight to the gradient.
        unknown: refused.

    Raises:
        BadOption: a hyper-parameter is out of range or unknown, a module has no table, or a table is in two groups.
    """

    _step_supports_amp_scaling = True  # GradScaler then always calls step() and leaves unscaling to it

    def __init__(
        self,
        modules: Module | Iterable[Module | ModuleGroup],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        *,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        **unknown: object,
    ) -> None:
        _refuse_unknown(unknown)
        defaults: dict[str, object] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "maximize": maximize,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        _check_group(defaults)
        self._tables: dict[int, tuple[Cluster, TableGradient]] = {}
        listed = [_as_group(entry) for entry in _entries(modules)]
        if not listed:
            raise BadOption("SparseAdam got no modules")
        super().__init__(listed, defaults)  # type: ignore[arg-type]  # add_param_group puts the proxies in

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Adds modules, with hyper-parameters of their own.

        Args:
            param_group: {"params": module or modules, "lr": ..., ...}.

        Raises:
            BadOption: as the constructor.
        """
        if not isinstance(param_group, Mapping):
            raise BadOption(
                f"SparseAdam takes modules or param groups, not both; got {type(param_group).__name__} among groups"
            )
        group = dict(param_group)
        listed = _entries(group.get("params", ()))
        _refuse_unknown({name: value for name, value in group.items() if name not in ("params", *_BOOKKEEPING)})
        _check_group({**self.defaults, **group})
        tables: dict[int, tuple[Cluster, TableGradient]] = {}
        for module in _table_modules(listed):
            tables[id(module._gradient.proxy)] = (module.table.cluster, module._gradient)
        if not tables:
            raise BadOption('a param group needs "params": one or more modules such as shardam.Embedding')
        for key, (_, gradient) in tables.items():
            if key in self._tables:
                raise BadOption(f"table {gradient.info.name!r} is in two param groups; give all its modules to one")
        super().add_param_group({**group, "params": [gradient.proxy for _, gradient in tables.values()]})
        self._tables.update(tables)
        for _, gradient in tables.values():
            gradient.own(self)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yields what clipping needs: one parameter per table, whose .grad is the merged gradient [U, dim]."""
        for group in self.param_groups:
            yield from group["params"]

    @overload
    def step(self, closure: None = None, *, sync: bool = False) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, sync: bool = False) -> float: ...

    def step(self, closure: Callable[[], float] | None = None, *, sync: bool = False) -> float | None:
        """Queues one push with every table that has a gradient, and returns.

        Without a gradient nothing is pushed in async mode, and an empty contribution in a group. Under a GradScaler that found
        an inf or NaN the gradient counts as used; in a group this worker abstains from the step. In sync mode a gradient that
        is not finite is not refused here but by the shards, for all ranks; one that is too large is refused for all, too.

        Args:
            closure: evaluates the model again and returns the loss.
            sync: wait until the shards have applied the step, in sync mode for all ranks; its error is then raised here.

        Raises:
            NonFiniteGradient, MessageTooLarge, BadOption: this step; nothing of it was sent. Or the gradient of the step before
                was written to after it.
            ShardamError: an earlier queued push failed, and this step's gradient is kept for another step(); or with `sync`
                this one.
        """
        try:
            for cluster in self._clusters():
                cluster._pusher.raise_error()
            self._check_pushed(applied=False)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            started = time.perf_counter()
            self._contribute()
            for cluster in self._clusters():
                cluster._timings.add("step", time.perf_counter() - started)
            if sync:
                self.synchronize()
        except BaseException:
            self._forget_scaler()
            raise
        return loss

    def _contribute(self) -> None:
        """Queues what this step is on each cluster."""
        abstains = bool(getattr(self, "found_inf", 0))
        scale = getattr(self, "grad_scale", None)
        steps = {} if abstains else self._table_steps(1.0 if scale is None else float(scale))
        for cluster, gradients in self._by_cluster().items():
            sections = steps.get(cluster, {})
            used = gradients if abstains else list(sections)
            try:
                if sections:
                    cluster._queue_push(list(sections.values()), "gradient")
                elif cluster.mode != "async":
                    cluster._queue_push([], "abstain" if abstains else "empty")
            except MessageTooLarge:
                if cluster.mode != "async":  # the group has been told
                    _mark_pushed(used)
                raise
            _mark_pushed(used)

    def _table_steps(self, grad_scale: float) -> dict[Cluster, dict[TableGradient, TableStepGradient]]:
        """Returns what there is to push; all of it is checked before any of it is sent."""
        steps: dict[Cluster, dict[TableGradient, TableStepGradient]] = {}
        for group in self.param_groups:
            options, is_checked = _options(group), False
            for proxy in group["params"]:
                cluster, gradient = self._tables[id(proxy)]
                waiting = gradient.to_push()
                if waiting is None:
                    continue
                info = gradient.info
                if not is_checked:
                    check_options(options, grad_scale, info.name)
                    is_checked = True
                row_ids, rows = (np.ascontiguousarray(tensor.detach().cpu().numpy()) for tensor in waiting)
                finite = cluster.mode != "sync"  # there the shards refuse it, for every rank and not for this one alone
                step = merged_gradient(info, row_ids, rows, options, grad_scale, finite=finite)
                steps.setdefault(cluster, {})[gradient] = step
        return steps

    def _forget_scaler(self) -> None:
        """Drops what a GradScaler left for a step that failed: it takes it back only from a step that returns."""
        for name in ("found_inf", "grad_scale"):
            self.__dict__.pop(name, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the tables' gradients; what was not pushed is dropped.

        A group is told of a dropped gradient, once: this worker abstains from a step, and the others go on.

        Args:
            set_to_none: as in torch; a gradient of rows has no zeros to keep, so both do the same.

        Raises:
            ShardamError: an earlier queued push failed, and the group could not be told; the gradient is kept.
        """
        for cluster, gradients in self._by_cluster().items():
            dropped = any(gradient.to_push() is not None for gradient in gradients)
            if dropped and cluster.mode != "async" and not (cluster._is_closed or cluster._session.ended):
                cluster._queue_push([], "abstain")
            for gradient in gradients:
                gradient.clear()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Loads hyper-parameters; the moments are where they were, on the shards.

        Args:
            state_dict: of a SparseAdam; one of torch.optim.SparseAdam before its first step will do, too.

        Raises:
            BadOption: it holds moments, or hyper-parameters that no push may carry.
        """
        if state_dict.get("state"):
            raise BadOption(
                "the state_dict holds moments, and those of this optimizer live on the shards; write them with "
                "module.table.assign(ids, weight, exp_avg=..., exp_avg_sq=...) and load the param_groups alone"
            )
        groups = state_dict.get("param_groups")
        for group in groups if isinstance(groups, list) else []:
            _refuse_unknown({name: value for name, value in group.items() if name not in ("params", *_BOOKKEEPING)})
            check_options(_options({**self.defaults, **group}), 1.0, "(all)")
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, object]) -> None:
        """Completes groups that were saved without this class's own hyper-parameters."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def __reduce__(self) -> NoReturn:
        """Refuses pickling and copying: a table's gradient has one owner.

        Raises:
            TypeError: always, as for every object that cannot be pickled.
        """
        raise TypeError(
            "a shardam SparseAdam cannot be pickled or copied; make one of the modules where they are and hand it "
            "load_state_dict(optimizer.state_dict())"
        )

    def synchronize(self) -> None:
        """Waits until every queued push has been applied, in sync mode with those of all other ranks.

        Raises:
            ShardamError: a queued push failed.
            BadOption: a gradient was written to after step().
        """
        for cluster in self._clusters():
            cluster._synchronize()
        self._check_pushed(applied=True)

    def _check_pushed(self, *, applied: bool) -> None:
        for _, gradient in self._tables.values():
            gradient.check_pushed(applied=applied)

    def _clusters(self) -> list[Cluster]:
        return list(self._by_cluster())

    def _by_cluster(self) -> dict[Cluster, list[TableGradient]]:
        clusters: dict[Cluster, list[TableGradient]] = {}
        for cluster, gradient in self._tables.values():
            clusters.setdefault(cluster, []).append(gradient)
        return clusters


def _mark_pushed(gradients: Iterable[TableGradient]) -> None:
    for gradient in gradients:
        gradient.mark_pushed()


def _table_modules(listed: Iterable[object]) -> Iterator[TableModule]:
    """Yields the modules that have one table each.

    Raises:
        BadOption: a module has none.
    """
    for module in listed:
        if isinstance(module, EmbeddingCollection):
            yield from module._table_modules()
        elif isinstance(module, TableModule):
            yield module
        else:
            raise BadOption(
                "SparseAdam takes shardam.Embedding, EmbeddingBag and EmbeddingCollection modules, got "
                f"{type(module).__name__}; {_remedy_for(module)}"
            )


def _remedy_for(entry: object) -> str:
    if isinstance(entry, torch.nn.Module) and any(isinstance(part, TableModule) for part in entry.modules()):
        return (
            "pass the modules in it that have tables: [m for m in model.modules() if isinstance(m, (shardam.Embedding, "
            "shardam.EmbeddingBag, shardam.EmbeddingCollection))]"
        )
    if isinstance(entry, (torch.nn.Module, torch.Tensor)):
        return "dense parameters belong to a torch.optim optimizer beside this one"
    return 'pass the modules themselves, or dicts with them as "params"'


def _entries(modules: object) -> list[object]:
    """Returns what was passed as a list; a ModuleList of modules with tables is one, any other module is an entry itself."""
    if isinstance(modules, (torch.nn.Module, torch.Tensor, str)):
        entries: list[object] = list(modules) if isinstance(modules, (torch.nn.ModuleList, torch.nn.Sequential)) else []
        return entries if entries and all(isinstance(entry, Module) for entry in entries) else [modules]
    return list(modules) if isinstance(modules, Iterable) else [modules]


def _as_group(entry: object) -> object:
    """Torch wants a group to be a dict."""
    return dict(entry) if isinstance(entry, Mapping) else entry


def _refuse_unknown(names: dict[str, object]) -> None:
    unknown = sorted(set(names) - set(HYPER_PARAMETERS))
    if unknown:
        raise BadOption(
            f"SparseAdam does not know {', '.join(unknown)}; supported are {', '.join(HYPER_PARAMETERS)}",
            metadata={"options": ",".join(unknown)},
        )


def _check_group(group: dict[str, object]) -> None:
    """Refuses hyper-parameters that no table could use from the start; a scheduler may later take lr to 0."""
    options = _options(group)
    check_options(options, 1.0, "(all)")
    if options.lr == 0:
        raise BadOption("SparseAdam: lr must be > 0; a scheduler may take it to 0 later")


def _options(group: dict[str, object]) -> AdamOptions:
    """Reads a param group as numbers of this moment: a tensor that changes later changes no push that was made."""
    beta1, beta2 = _pair(group["betas"])
    return AdamOptions(
        lr=_number("lr", group["lr"]),
        betas=(beta1, beta2),
        eps=_number("eps", group["eps"]),
        weight_decay=_number("weight_decay", group["weight_decay"]),
        decoupled_weight_decay=_flag("decoupled_weight_decay", group["decoupled_weight_decay"]),
        maximize=_flag("maximize", group["maximize"]),
    )


def _number(name: str, value: object) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise BadOption(f"SparseAdam: {name} must be a number or a tensor of one element, got shape {tuple(value.shape)}")
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadOption(f"SparseAdam: {name} must be a number, got {value!r}")
    return float(value)


def _pair(value: object) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise BadOption(f"SparseAdam: betas must be a pair of numbers, got {value!r}")
    return _number("betas[0]", value[0]), _number("betas[1]", value[1])


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise BadOption(f"SparseAdam: {name} must be True or False, got {value!r}")
    return value
