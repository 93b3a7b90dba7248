"""The shape that every power has, in the launcher and in a scheduler.

A power is one section of the configuration. SGLang is hooked once in each place that several powers
need (:mod:`~sgl_ext.engine.core.dispatch`, :mod:`~sgl_ext.engine.front.dispatch`); the dispatchers
call the methods below, in the order of :data:`~sgl_ext.engine.core.powers.ORDER`. A place that only
one power needs is hooked in the power's own package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from sgl_ext.config import ExtConfig
from sgl_ext.config.values import Section
from sgl_ext.engine.core.hooks import Hook, Original
from sgl_ext.engine.core.sglang_types import (
    ForwardBatch,
    PrefillAdder,
    RadixTree,
    Req,
    ScheduleBatch,
    Scheduler,
    ServerArgs,
    StepPlan,
    TokenizerManager,
)
from sgl_ext.engine.core.unserved import Unserved, require_served

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sgl_ext.engine.core.runtime import ExtRuntime
    from sgl_ext.engine.step.forward import PlannedForward
    from sgl_ext.engine.step.rows import Row

Answer = Mapping[str, Any] | list[Mapping[str, Any]]
"""What SGLang's ``TokenizerManager`` yields for a request."""
Watch = Callable[[Answer], None]
"""Called with each answer to a request before the client gets it."""


SectionT = TypeVar("SectionT", bound=Section)


class Power(Generic[SectionT]):
    """Base class of the powers. Its methods do nothing; a power overrides those that it needs.

    Args:
        config: the whole configuration.
        section: the power's own part of it.
    """

    name: ClassVar[str]
    """Name of the power's section, of its packages and of its part in ``/server_info``."""
    path: ClassVar[str | None] = None
    """Path that the power's HTTP routes begin with, if it has any."""
    hooks: ClassVar[tuple[Hook, ...]] = ()
    """Hooks on places of a scheduler that no other power needs."""
    launcher_hooks: ClassVar[tuple[Hook, ...]] = ()
    """Hooks on places of the launcher that no other power needs."""
    unserved: ClassVar[Unserved] = ()
    """Arguments of SGLang that the power does not serve, beside those of every power."""

    def __init__(self, config: ExtConfig, section: SectionT) -> None:
        self.config = config
        self.section = section

    # --- in the launcher -------------------------------------------------------------------------

    def declare(self, server_args: ServerArgs) -> None:
        """Sets arguments of SGLang that the power needs, before SGLang resolves them. Must not
        import SGLang's modules: they read the environment that resolution sets.

        Raises:
            ActivationError: the arguments ask for something that the power does not serve.
        """
        require_served(server_args, self.name, self.unserved)

    def require_resolved(self, view: ServerArgs, model: Any) -> None:
        """Checks arguments that SGLang has resolved, before a scheduler loads the model.

        Args:
            view: the resolved arguments.
            model: SGLang's ``ModelConfig``.

        Raises:
            ActivationError: the power does not serve them, or not this model.
        """

    def serve(self, app: Any, manager: TokenizerManager, info: Mapping[str, Any]) -> Front | None:
        """Adds the power's routes to SGLang's HTTP server before it starts.

        Args:
            app: the FastAPI application.
            manager: SGLang's ``TokenizerManager``.
            info: the ready message of the first scheduler.

        Returns:
            The power's view of requests, if it has one.
        """

    # --- in a scheduler --------------------------------------------------------------------------

    def open(self, ext: ExtRuntime, scheduler: Scheduler) -> None:
        """Prepares the power. All parts of the scheduler exist; it has not reported ready yet.

        Raises:
            ExtError: the power cannot serve this model or machine; the start is refused.
        """

    def arrive(self, req: Req) -> None:
        """Is called when a request is put into the waiting queue, also after a retraction."""

    def needed(self, req: Req) -> None:
        """Is called when another power has lost KV that a waiting request would have resumed with:
        the request is prefilled like a new one."""

    def owns(self, req: Req) -> bool:
        """Returns whether this power brings all KV of a waiting request, so that powers behind it
        in the order leave the request alone."""
        return False

    def matching(self, req: Req, prefix: int) -> None:
        """Is called before SGLang looks a waiting request up in the external cache.

        Args:
            prefix: tokens that the radix tree has on the device.
        """

    def ready(self, adder: PrefillAdder, req: Req, continuing: bool) -> bool:
        """Returns whether admission of a waiting request may be tried in this step.

        Args:
            adder: SGLang's ``PrefillAdder`` of this step.
            continuing: whether the batch goes on with a chunked prompt.
        """
        return True

    def plan(self, adder: PrefillAdder, req: Req) -> bool:
        """Makes the request's next prefill plan. Returns False if its admission is deferred."""
        return True

    def resume(self, adder: PrefillAdder, req: Req) -> Any | None:
        """Returns SGLang's ``AddReqResult`` if the power has decided the admission of the request,
        or None if SGLang is to admit it as it does any request."""

    def acquire(self, req: Req) -> None:
        """Keeps what the request's plan takes from elsewhere until its prefill has ended. SGLang
        asks the plan for the request's cost next."""

    def concede(self, req: Req) -> bool:
        """Gives up what :meth:`acquire` keeps, so that the request fits into memory that is its
        own. Returns whether there was anything."""
        return False

    def seats(self) -> int:
        """Returns how many requests will join the batch in this step or soon without having been
        admitted by SGLang."""
        return 0

    def make_room(self, adder: PrefillAdder, req: Req) -> bool:
        """Preempts requests for one that memory is missing for. Returns whether any was."""
        return False

    def preempt(self, original: Original, adder: PrefillAdder, req: Req) -> bool | None:
        """Preempts requests for one that there are too many others beside.

        Args:
            original: SGLang's way to do it.

        Returns:
            Whether it can be admitted now; None to leave the decision to others.
        """

    def considered(self, adder: PrefillAdder, req: Req, admitted: bool) -> None:
        """Is called when SGLang has tried to admit a request that was ready and planned."""

    def continued(self, req: Req) -> None:
        """Is called when a further part of a chunked prompt was admitted."""

    def deferred(self, req: Req) -> None:
        """Is called when a planned request is passed over before SGLang has tried to admit it."""

    def withheld(self) -> Iterable[Req]:
        """Returns waiting requests that the power keeps outside of SGLang's queue."""
        return ()

    def requeued(self, scheduler: Scheduler, req: Req, arrived: float) -> None:
        """Is called when a retracted request was put at the end of the waiting queue.

        Args:
            arrived: when it was first queued, by SGLang's clock.
        """

    def poll(self) -> None:
        """Is called once in every iteration of the scheduler's loop, also when it is idle."""

    def before_step(self, running: ScheduleBatch) -> None:
        """Is called before SGLang plans a step, with the batch that decodes."""

    def after_step(self, plan: StepPlan) -> None:
        """Is called with the plan of a step, in which ``running_batch`` may be changed."""

    def pending(self) -> bool:
        """Returns whether waiting requests depend on I/O that is under way."""
        return False

    def forwarding(self, batch: ScheduleBatch) -> None:
        """Is called before SGLang runs a ``ScheduleBatch``."""

    def forwarded(self, batch: ScheduleBatch, seconds: float) -> None:
        """Is called after the run, with the time that it has taken."""

    def positioned(self, batch: ForwardBatch) -> ForwardBatch:
        """Returns SGLang's ``ForwardBatch`` with the positions that its tokens have."""
        return batch

    def fill(self, rid: str, start: int, end: int, slots: NDArray[np.int64]) -> None:
        """Copies KV that is there already into ``slots`` of tokens ``start .. end - 1``."""

    def within(self, forward: PlannedForward, rows: list[Row]) -> AbstractContextManager[list[Row]]:
        """Surrounds a forward that follows plans. Yields the rows that it begins with."""
        return nullcontext(rows)

    def prefilled(self, rid: str) -> None:
        """Is called when the prefill of a planned request has ended, or will not take place."""

    def released(self, tree: RadixTree, req: Req, checkpointed: bool) -> None:
        """Is called before the radix tree releases a request that ends or is retracted.

        Args:
            checkpointed: whether the tree has taken the request's KV.
        """

    def forget(self, rid: str) -> None:
        """Is called when a waiting request has been aborted, or its KV released."""

    def reset(self) -> None:
        """Is called before SGLang's tree forgets all cached KV, if there are tiers."""

    def weights_changed(self) -> None:
        """Is called before an update of the model's weights."""

    def describe(self) -> Mapping[str, Any] | None:
        """Returns the power's part of ``/server_info``; None if it has none."""

    def close(self) -> None:
        """Is called when the scheduler ends in an orderly way."""


class Front:
    """A power's view of the requests that reach the tokenizer's process."""

    def accept(self, request: Any) -> Watch | None:
        """Checks and rewrites SGLang's ``GenerateReqInput`` or ``EmbeddingReqInput``.

        Returns:
            A function that is called with each answer, if the power needs them.

        Raises:
            ExtError: the request asks for what cannot be served.
        """
