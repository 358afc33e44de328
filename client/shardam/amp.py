"""torch.amp.GradScaler for several workers, each with sparse gradients of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist


class GradScaler(torch.amp.GradScaler):
    """Scales losses as torch's does, and takes the same decision on all ranks.

    DDP averages dense gradients, so an inf in one is an inf on every rank. A sparse gradient stays with its worker: with
    torch's own scaler an inf in it lowers the loss scale of one rank alone, and the dense replicas drift apart. This one takes
    the maximum of found_inf over all ranks whenever it looks for one. An optimizer whose gradient is not finite on one rank is
    skipped on every rank, and a rank that has no sparse gradient takes part with 0; in sync mode all ranks abstain, and the
    group's step does not count. With scales that differ a sync group refuses the step (GroupMismatch). All ranks must therefore
    call unscale_() and step() for the same optimizers in the same order, as they do in a training loop. Without a process group
    this is torch's class.

    Args:
        device: "cpu", or "cuda" as torch's default.
        init_scale: first loss scale.
        growth_factor: multiplies the scale after growth_interval steps without an inf.
        backoff_factor: multiplies the scale after an inf.
        growth_interval: steps.
        enabled: False: scales nothing.
        process_group: the ranks that train together; None: all.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscales, and returns on the scale's device whether any rank found an inf."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not dist.is_available() or not dist.is_initialized():
            return found
        anywhere = torch.zeros((), dtype=torch.float32, device=inv_scale.device)
        for flag in found.values():
            anywhere = torch.maximum(anywhere, flag.to(anywhere.device))
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.process_group)
        return {anywhere.device: anywhere}
