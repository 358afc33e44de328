"""What Embedding and EmbeddingBag have in common: a torch module without parameters whose rows live in a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NoReturn, Self

import numpy as np
import torch
from torch import nn

from shardam._arrays import Int64s, Values, as_row_ids, check_bounds, check_flag
from shardam._gradient import TableGradient, gradient_of
from shardam._table_files import ImportReport
from shardam._torch_state import ModuleState, OptimizerState, export_state, import_state, weight_of
from shardam._uses import CompactRows, Use
from shardam._values import TableInfo
from shardam.cluster import Cluster
from shardam.table import Table
from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import BadOption
from shardam_proto.schema import DtypeName, TableSpec

_NEUTRAL: Mapping[str, tuple[object, str]] = {
    "max_norm": (None, "renormalizing would write rows in a forward pass; clip with sparse.parameters() instead"),
    "norm_type": (2.0, "it only matters with max_norm"),
    "scale_grad_by_freq": (False, "scale the loss instead"),
    "sparse": (True, "gradients of tables on shards are always sparse"),
    "_weight": (None, "rows live on shards; from_pretrained writes them"),
}
"""torch's other arguments: the only value each may have, and what to do instead."""

_CPU = torch.device("cpu")

_OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Output:
    """Where a module's output goes.

    Attributes:
        device: None: the ids' device.
        dtype: rows are float32 until the last moment, and so are sums of gradients.
    """

    device: torch.device | str | None
    dtype: torch.dtype


class Parameterless(nn.Module):
    """A module whose rows live elsewhere: refuses what torch would do to its parameters, and would do to none here."""

    def _who(self) -> str:
        """Names the module in messages."""
        raise NotImplementedError

    def freeze(self) -> Self:
        """Stops training through this module, and returns it; other modules of the same tables go on.

        From the next forward on its rows get no gradient. `trainable = True` of a module with a table undoes it.
        """
        for module in self.modules():
            if isinstance(module, TableModule):
                module.trainable = False
        return self

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:
        """Refuses: there is no parameter to set.

        Raises:
            BadOption: always.
        """
        remedy = "set module.trainable = True" if requires_grad else "call module.freeze()"
        raise BadOption(f"{self._who()} has no parameters, so requires_grad_({requires_grad}) would do nothing; {remedy}")

    def zero_grad(self, set_to_none: bool = True) -> NoReturn:
        """Refuses: the gradient is the optimizer's.

        Raises:
            BadOption: always.
        """
        raise BadOption(
            f"{self._who()} has no parameters, so zero_grad(set_to_none={set_to_none}) would do nothing; call zero_grad() of "
            "the SparseAdam that has it"
        )


class TableModule(Parameterless):
    """A module whose rows live in a table of a cluster; base of Embedding and EmbeddingBag.

    It has no parameters: DDP, FSDP and dense optimizers pass it over, and what a program does through `model.parameters()`
    does not reach it. `model.zero_grad()` and `model.requires_grad_(False)` on a module around it therefore do nothing here:
    use the SparseAdam's zero_grad, and freeze(). What is called on this module itself and cannot work is refused. `.to(device)`
    has nothing to move: the output is on `device=`, else on the ids' device. A deep copy shares the table; a pickle carries the
    cluster's address and the table's name, and connects anew when it is first used.

    Args:
        cluster: the cluster that holds the table.
        spec: the table; created if it does not exist.
        output: where the output goes.
        trainable: False: the rows never get a gradient.

    Raises:
        BadOption: an argument that is not supported; the message has the remedy.
        SchemaMismatch: the table exists with another schema.
    """

    _known: tuple[TableInfo, TableGradient] | None = None

    def __init__(self, cluster: Cluster, spec: TableSpec, output: Output, trainable: bool) -> None:
        super().__init__()
        if output.dtype not in _OUTPUT_DTYPES:
            raise BadOption(f"{self._called(spec)}: output_dtype must be one of {_OUTPUT_DTYPES}, got {output.dtype!r}")
        if not isinstance(cluster, Cluster):
            raise BadOption(f"{self._called(spec)}: cluster must come from connect or LocalCluster, got {cluster!r}")
        self.trainable = check_flag(trainable, f"{self._called(spec)}: trainable")
        self.device = _usable_device(output.device, self._called(spec))
        self.output_dtype = output.dtype
        self._table = cluster.create_table(spec)

    @classmethod
    def _check_neutral(cls, table: str, arguments: Mapping[str, object]) -> None:
        """Refuses what torch's module has and this one cannot do.

        Raises:
            BadOption: with the remedy.
        """
        for name, value in arguments.items():
            neutral, remedy = _NEUTRAL[name]
            if value is not neutral and value != neutral:
                raise BadOption(f"{cls.__name__} of table {table!r}: {name} can only be {neutral!r}, got {value!r}; {remedy}")

    @classmethod
    def _called(cls, spec: TableSpec) -> str:
        return f"{cls.__name__} of table {spec.name!r}"

    def _who(self) -> str:
        return self._called(self._table.spec)

    @property
    def table(self) -> Table:
        """The table."""
        return self._table

    @property
    def num_embeddings(self) -> int | None:
        """Number of rows of a bounded table, else None."""
        return self._table.spec.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Elements of a row."""
        return self._table.dim

    @property
    def padding_idx(self) -> int | None:
        """The padding row, if there is one."""
        return self._table.spec.padding_idx

    def import_state_dict(
        self,
        state_dict: Mapping[str, object],
        optimizer_state_dict: Mapping[str, object] | None = None,
        *,
        name: str = "weight",
        param: int | str = 0,
        ids: Values | None = None,
        overwrite: bool = False,
    ) -> ImportReport:
        """Fills the table with the state of a torch module, and of the torch.optim.SparseAdam that trained it.

        All is checked before anything is written. Hyper-parameters are reported (`options`), not set: our SparseAdam has them.

        Args:
            state_dict: of torch.nn.Embedding or EmbeddingBag, or of a model that has one.
            optimizer_state_dict: of torch.optim.SparseAdam; None: moments are zero and the table's step stays.
            name: the weight's name in state_dict.
            param: the weight's index in the optimizer's state_dict, or its name there.
            ids: of an unbounded table: which id each row is, int64 [N], each once.
            overwrite: a table with rows or steps becomes what is given; its other rows are deleted.

        Raises:
            BadOption: no such tensor or parameter, another optimizer's state, or ids that go with another kind of table.
            WrongShape, NonFiniteState: values that do not fit the table; the message has both shapes.
            CheckpointMismatch: the table has rows or steps and overwrite is False, or has taken another number of steps.
        """
        check_flag(overwrite, f"{self._who()}: overwrite")
        weight = weight_of(state_dict, name, self._table.name)
        return import_state(self._table, weight, optimizer_state_dict, param, ids, overwrite)

    def export_state_dict(
        self, *, name: str = "weight", ids: Values | None = None, options: AdamOptions | None = None
    ) -> tuple[ModuleState, OptimizerState]:
        """Returns the state with which a torch module and torch.optim.SparseAdam go on locally.

        Load them as they are: `local.load_state_dict(module_state)`, `optimizer.load_state_dict(optimizer_state)` with the
        module's weight as the optimizer's only parameter. All rows are read into memory.

        Args:
            name: the weight's name in the module's state.
            ids: of an unbounded table: which ids, int64 [N]; row i is then ids[i].
            options: hyper-parameters of the optimizer's state; None: those of the table's last step.

        Raises:
            BadOption: ids are missing, rows count their own steps, or the last step had weight decay, which torch's lacks.
            StaleState: others pushed to the table meanwhile.
        """
        return export_state(self._table, name, ids, options)

    @property
    def _gradient(self) -> TableGradient:
        info = self._table.info()
        if self._known is None or self._known[0] is not info:
            self._known = info, gradient_of(self._table.cluster, info)
        return self._known[1]

    def __getstate__(self) -> dict[str, object]:
        """Leaves out what belongs to this process."""
        return {**self.__dict__, "_known": None}

    def _ids(self, row_ids: torch.Tensor | Values) -> tuple[Int64s, torch.device]:
        """Returns checked ids and the output's device."""
        device = row_ids.device if isinstance(row_ids, torch.Tensor) else _CPU
        if isinstance(row_ids, torch.Tensor) and _is_plain(row_ids):
            given = row_ids.numpy()
            ids = np.ascontiguousarray(given).reshape(given.shape)
        else:
            ids = as_row_ids(row_ids.cpu() if isinstance(row_ids, torch.Tensor) else row_ids)
        check_bounds(ids, self.num_embeddings, self._table.name)
        return ids, self.device or device

    def _combine(self, use: Use, compact: CompactRows) -> torch.Tensor:
        """Computes a use's output from the rows it needs."""
        raise NotImplementedError

    # -- what a module without parameters cannot do is said

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        """Explains why there is no weight.

        Raises:
            AttributeError: as for every missing attribute, so that hasattr() is False.
        """
        if name == "weight":
            raise AttributeError(
                f"shardam.{type(self).__name__} has no weight: the rows live on shards. Read them with module.table.pull(ids), "
                "write them with module.table.assign(ids, weight)"
            )
        return super().__getattr__(name)

    def _apply(self, fn: object, recurse: bool = True) -> Self:
        """Refuses a change of dtype, such as model.bfloat16(); a change of device has nothing to move.

        Raises:
            BadOption: the dtype would change.
        """
        dtype = fn(torch.empty(0)).dtype if callable(fn) else torch.float32
        if dtype != torch.float32:
            raise BadOption(
                f"{self._who()} has no parameters to convert to {dtype}: its rows are on shards, in the "
                f"table's dtype. Make the module with output_dtype={dtype} for its output, or with dtype={dtype} for what is "
                "stored, and convert the other modules of the model one by one"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *unused: object) -> None:
        """Refuses the weight of a torch.nn.Embedding; this module has nothing to load.

        Raises:
            BadOption: the state_dict has a weight for it.
        """
        if prefix + "weight" in state_dict:
            raise BadOption(
                f"{self._who()} has no weight to load from {prefix + 'weight'!r}: the rows live on shards. "
                f"Write them with module.import_state_dict(state_dict, name={prefix + 'weight'!r}), or make the module with "
                f"shardam.{type(self).__name__}.from_pretrained(weight, ...), and take the key out of the state_dict"
            )
        super()._load_from_state_dict(state_dict, prefix, *unused)

    def _describe(self, *parts: str) -> str:
        padding = [] if self.padding_idx is None else [f"padding_idx={self.padding_idx}"]
        return ", ".join([f"{self.num_embeddings}, {self.embedding_dim}", *parts, *padding, f"table={self._table.name!r}"])


def _is_plain(row_ids: torch.Tensor) -> bool:
    """True: NumPy can see the tensor's memory as it is, in a tenth of the time that is needed for any kind of tensor."""
    return type(row_ids) is torch.Tensor and row_ids.dtype is torch.int64 and row_ids.is_cpu and row_ids.layout is torch.strided


def _usable_device(device: torch.device | str | None, who: str) -> torch.device | None:
    """Returns an output's device.

    Raises:
        BadOption: torch knows no such device, or this machine has none.
    """
    if device is None:
        return None
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BadOption(
            f"{who}: device must be one that torch knows, such as 'cpu' or 'cuda:0', got {device!r}; leave it out for the "
            "ids' device"
        ) from error
    if known.type == "cuda" and (known.index or 0) >= torch.cuda.device_count():
        raise BadOption(
            f"{who}: device {str(known)!r} is not there, torch sees {torch.cuda.device_count()} CUDA devices on this machine; "
            "name another one, or leave device out for the ids' device"
        )
    return known


def dtype_name_of(dtype: DtypeName | torch.dtype) -> DtypeName:
    """Returns the schema's name of a dtype, which TableSpec checks."""
    if isinstance(dtype, torch.dtype):
        name: DtypeName = str(dtype).removeprefix("torch.")  # type: ignore[assignment]  # TableSpec checks it
        return name
    return dtype
