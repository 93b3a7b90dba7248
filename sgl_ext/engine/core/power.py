"""Interface that every power implements, in the launcher and in a scheduler.

A power implements one section of the configuration. A place of SGLang that several powers need is
hooked once (:mod:`~sgl_ext.engine.core.dispatch`, :mod:`~sgl_ext.engine.front.dispatch`). The
dispatchers call the methods below in the order of :data:`~sgl_ext.engine.core.powers.ORDER`, or in
its reverse. A place that only one power needs is hooked in the power's own package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from sgl_ext.config import ExtConfig
from sgl_ext.config.values import Section
from sgl_ext.engine.core.hooks import Hook, Original
from sgl_ext.engine.core.served import Property
from sgl_ext.engine.core.sglang_types import (
    ForwardBatch,
    GenerateReqInput,
    ModelConfig,
    PrefillAdder,
    RadixTree,
    Req,
    ScheduleBatch,
    Scheduler,
    ServerArgs,
    StepPlan,
    TokenizerManager,
)
from sgl_ext.engine.core.unserved import COMMON, Unserved, require_served
from sgl_ext.planning.plan import Source, Span

if TYPE_CHECKING:
    import numpy as np
    import torch
    from fastapi import FastAPI
    from numpy.typing import NDArray

    from sgl_ext.engine.core.runtime import ExtRuntime
    from sgl_ext.engine.step.forward import PlannedForward
    from sgl_ext.engine.step.rows import Row

Answer = Mapping[str, Any] | list[Mapping[str, Any]]
"""Answer, or list of answers, that SGLang's ``TokenizerManager`` yields for a request."""
Watch = Callable[[Answer], None]
"""Function that is called with each answer to a request before the client gets the answer."""

Filler = Callable[[str, "Sequence[Span]", int, "NDArray[np.int64]"], None]
"""Function that copies existing KV into slots of a request: its id, spans of one type of source,
the first token of the forward, and the slots from this token on, int64 ``[tokens]``. The KV is in
place for the calling thread's next work on the device."""

SectionT = TypeVar("SectionT", bound=Section)


class Power(Generic[SectionT]):
    """Base class of the powers. Its methods do nothing; a power overrides those that it needs.

    Args:
        config: the whole configuration.
        section: the section of the power.
    """

    name: ClassVar[str]
    """Name of the power's section, of its packages and of its part of ``/server_info``."""
    path: ClassVar[str | None] = None
    """Path prefix of the power's HTTP routes; None if it has none."""
    param: ClassVar[str | None] = None
    """Key of the power in the ``custom_params`` of users' requests; None if it has none."""
    hooks: ClassVar[tuple[Hook, ...]] = ()
    """Hooks on places of a scheduler that no other power needs."""
    launcher_hooks: ClassVar[tuple[Hook, ...]] = ()
    """Hooks on places of the launcher that no other power needs."""
    unserved: ClassVar[Unserved] = ()
    """Arguments of SGLang that the power does not serve, besides those that no power serves."""
    needs_slab: ClassVar[bool] = False
    """Whether the power itself reads or writes KV in the slab."""
    plans_rows: ClassVar[bool] = False
    """Whether the power's plans split a forward into rows that alias one request."""

    def __init__(self, config: ExtConfig, section: SectionT) -> None:
        self.config = config
        self.section = section

    def attention(self) -> dict[Property, str]:
        """Returns the properties that the power requires of the attention backends.

        The values name the power or the option of its section that has the requirement. Every power
        works on KV in the slab, itself or through tiers.
        """
        rows = {Property.STORES_FIRST: self.name} if self.plans_rows else {}
        return {**rows, Property.STRIDED: self.name}

    @property
    def fillers(self) -> Mapping[type[Source], Filler]:
        """Returns the function that fills the spans of each type of source that the power plans.

        A type has one filler.
        """
        return {}

    # --- in the launcher -------------------------------------------------------------------------

    def declare(self, server_args: ServerArgs) -> None:
        """Sets arguments of SGLang that the power needs, before SGLang resolves them.

        Must not import SGLang's modules: they read the environment that resolution sets. The base
        class only checks the arguments.

        Raises:
            ActivationError: the arguments ask for something that the power does not serve.
        """
        require_served(server_args, self.name, (*COMMON, *self.unserved))

    def require_resolved(self, view: ServerArgs, model: ModelConfig) -> None:
        """Checks arguments that SGLang has resolved, before a scheduler loads the model.

        Args:
            view: the resolved arguments.
            model: SGLang's ``ModelConfig``.

        Raises:
            ActivationError: the power does not serve the arguments or the model.
        """

    def serve(
        self, app: FastAPI, manager: TokenizerManager, info: Mapping[str, Any]
    ) -> Front | None:
        """Adds the power's routes to SGLang's HTTP server before it starts.

        Args:
            app: the FastAPI application.
            manager: SGLang's ``TokenizerManager``.
            info: the ready message of the first scheduler.

        Returns:
            The power's front, which sees each request; None if it has none.
        """

    # --- in a scheduler --------------------------------------------------------------------------

    def open(self, ext: ExtRuntime, scheduler: Scheduler) -> None:
        """Prepares the power. All parts of the scheduler exist; it has not reported ready yet.

        Raises:
            ExtError: the power cannot serve this model or machine; the start is refused.
        """

    def arrive(self, req: Req) -> None:
        """Is called before a request is put into the waiting queue, also after a retraction."""

    def needed(self, req: Req) -> None:
        """Is called when another power has lost KV of a waiting request that it held elsewhere.

        The request would have resumed with this KV. It is now prefilled like a new request.
        """

    def recomputes(self, req: Req) -> bool:
        """Returns whether the KV of a preempted request must be computed again, not kept."""
        return False

    def owns(self, req: Req) -> bool:
        """Returns whether a waiting request is this power's alone.

        The power provides or records all of its KV, or has not prepared for it yet. Powers behind
        it in the order leave such a request alone, and it is not restored.
        """
        return False

    def matching(self, req: Req, prefix: int) -> None:
        """Is called before SGLang looks up a waiting request in the external cache.

        Args:
            prefix: number of tokens that the radix tree has on the device.
        """

    def ready(self, adder: PrefillAdder, req: Req, continuing: bool) -> bool:
        """Returns whether admission of a waiting request may be tried in this step.

        Args:
            adder: SGLang's ``PrefillAdder`` of this step.
            continuing: whether the batch continues a chunked prompt.
        """
        return True

    def plan(self, adder: PrefillAdder, req: Req) -> bool:
        """Makes the request's next prefill plan. Returns False if its admission is deferred."""
        return True

    def resume(self, adder: PrefillAdder, req: Req) -> object | None:
        """Returns SGLang's ``AddReqResult`` if the power has decided the admission of the request.

        Returns None if SGLang is to admit the request like any other.
        """

    def acquire(self, req: Req) -> None:
        """Keeps KV that the request's plan uses until its prefill has ended.

        SGLang asks the plan for the request's cost after this call.
        """

    def concede(self, req: Req) -> bool:
        """Releases what :meth:`acquire` keeps, so that the request fits into the memory.

        Returns whether anything was released.
        """
        return False

    def joining(self) -> int:
        """Returns the number of requests that join the batch in this step or soon.

        It counts only requests that SGLang does not admit itself.
        """
        return 0

    def make_room(self, adder: PrefillAdder, req: Req) -> bool:
        """Preempts requests for a request that lacks memory. Returns whether any was preempted."""
        return False

    def preempt(self, original: Original, adder: PrefillAdder, req: Req) -> bool | None:
        """Preempts requests for a request for which the batch is full.

        Args:
            original: SGLang's ``preempt_to_schedule``.

        Returns:
            Whether the request can be admitted now; None to leave the decision to others.
        """

    def considered(self, adder: PrefillAdder, req: Req, admitted: bool) -> None:
        """Is called when SGLang has tried to admit a request that was ready and planned."""

    def continued(self, req: Req) -> None:
        """Is called when a further part of a chunked prompt that has a plan was admitted."""

    def deferred(self, req: Req) -> None:
        """Is called when a planned request is passed over before SGLang has tried to admit it.

        It is also called after every ``preempt_to_schedule``, whether or not the request has a
        plan.
        """

    def locked(self, req: Req) -> Sequence[torch.Tensor]:
        """Returns the slots of cached KV, beside those of its row, that the power has locked in the
        radix tree until the prefill of an admitted request has ended."""
        return ()

    def withheld(self) -> Iterable[Req]:
        """Returns waiting requests that the power keeps outside of SGLang's queue."""
        return ()

    def requeued(self, scheduler: Scheduler, req: Req, arrived: float) -> None:
        """Is called when a retracted request was put at the end of the waiting queue.

        Args:
            arrived: time at which the request was queued before, by SGLang's clock.
        """

    def poll(self) -> None:
        """Is called once in every iteration of the scheduler's loop, also when it is idle."""

    def before_step(self, running: ScheduleBatch) -> None:
        """Is called before SGLang plans a step, with the batch that decodes."""

    def after_step(self, plan: StepPlan) -> None:
        """Is called with the plan of a step, in which ``running_batch`` may be changed."""

    def pending(self) -> bool:
        """Returns whether waiting requests depend on I/O that is in progress."""
        return False

    def forwarding(self, batch: ScheduleBatch) -> None:
        """Is called before SGLang runs a ``ScheduleBatch``."""

    def forwarded(self, batch: ScheduleBatch) -> None:
        """Is called when SGLang has run a ``ScheduleBatch``; a device may still compute it."""

    def positioned(self, batch: ForwardBatch) -> ForwardBatch:
        """Returns SGLang's ``ForwardBatch`` of whole requests with the positions of its tokens."""
        return batch

    def launching(self, batch: ForwardBatch, whole: bool) -> None:
        """Is called before SGLang's ``ModelRunner`` computes the rows of a ``ForwardBatch``.

        Args:
            whole: whether these rows are computed in all layers. Otherwise :meth:`cut_over` may
                follow.
        """

    def cut_over(self, batch: ForwardBatch) -> None:
        """Is called when a forward goes on with other rows between two layers.

        Each request of the forward has some of its rows in ``batch``.
        """

    def eager(self, batch: ForwardBatch) -> bool:
        """Returns whether the power changes the attention of a forward, so that no captured CUDA
        graph can compute it."""
        return False

    def within(self, forward: PlannedForward, rows: list[Row]) -> AbstractContextManager[list[Row]]:
        """Surrounds a forward that follows plans. Yields the rows with which the forward begins."""
        return nullcontext(rows)

    def prefilled(self, rid: str) -> None:
        """Is called when the prefill of a planned request has ended.

        It is also called whenever the radix tree releases a request, with or without a plan.
        """

    def released(self, tree: RadixTree, req: Req, checkpointed: bool) -> None:
        """Is called before the radix tree releases a request that ends or is retracted.

        Args:
            checkpointed: whether the tree has taken over the request's KV.
        """

    def forget(self, rid: str) -> None:
        """Is called when a request that is in no batch is aborted, if there are tiers.

        No other end of a request calls it.
        """

    def reset(self) -> None:
        """Is called before SGLang's radix tree drops all cached KV, if there are tiers."""

    def weights_changed(self) -> None:
        """Is called after a change of the model's weights, before anything else uses them."""

    def describe(self) -> Mapping[str, object] | None:
        """Returns the power's part of ``/server_info``; None if it has none."""

    def close(self) -> None:
        """Is called when the scheduler ends in an orderly way."""


class Front:
    """A power's view of the requests that reach the tokenizer's process."""

    def accept(self, request: GenerateReqInput) -> Watch | None:
        """Checks and rewrites SGLang's ``GenerateReqInput`` or ``EmbeddingReqInput``.

        Returns:
            A function that is called with each answer, if the power needs the answers.

        Raises:
            ExtError: the request cannot be served.
        """
