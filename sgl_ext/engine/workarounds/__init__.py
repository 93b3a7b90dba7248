"""Workarounds for defects of SGLang 0.5.23, each to be removed when SGLang mends its own.

========================== ====================================================================
``beams``                  A retraction or a pause leaves the rows of a beam group's members
                           allocated, and an admission counts no rows for them. Remove when
                           ``Scheduler.pause_generation`` and ``PrefillAdder.preempt_to_schedule``
                           release or spare whole groups.
``checks``, ``validation`` Requests with prompts without tokens, token ids beyond the vocabulary,
                           values of wrong types or numbers that overflow end the scheduler or
                           answer 500. Remove a check when SGLang answers 400.
``logprobs``               Prompt logprobs of requests that have left a batch are assigned to the
                           next request. Remove when ``process_batch_result_prefill`` skips them.
``penalties``              A request that is computed again gets penalizers that have counted
                           nothing. Remove when SGLang feeds them the tokens generated before.
``secrets``                API keys are printed in the log of the arguments and reported by
                           ``/server_info``. Remove when ``resolved_dict`` masks them.
``stop_patterns``          ``stop_regex`` is matched without a time limit in the scheduler. Remove
                           when SGLang bounds it.
========================== ====================================================================
"""
