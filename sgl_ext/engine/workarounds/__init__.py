"""Workarounds for defects of SGLang, each to be removed when SGLang mends its own.

========================== ====================================================================
``beams``                  A retraction or a pause leaves the rows of a beam group's members
                           allocated, and an admission counts no rows for them. Remove when
                           ``Scheduler.pause_generation`` and ``PrefillAdder.preempt_to_schedule``
                           release or spare whole groups.
``checks``, ``validation`` Requests with prompts without tokens, token ids beyond the vocabulary,
                           values of wrong types or numbers that overflow end the scheduler or
                           answer 500. Remove a check when SGLang answers 400.
``embeddings``             ``input_embeds`` and embed overrides of other widths, types or models,
                           and batches of tokens and of embeddings, end the scheduler. Remove when
                           SGLang checks and separates them.
``empty_outputs``          Requests that were retracted while a forward of theirs ran send an
                           output without tokens, which counts as their first token. Remove when
                           ``stream_output`` skips them, as the processing of results does.
``logprobs``               Prompt logprobs of requests that have left a batch are assigned to the
                           next request. Remove when ``process_batch_result_prefill`` skips them.
``penalties``              A request that is computed again gets penalizers that have counted
                           nothing. Remove when SGLang feeds them the tokens generated before.
``rids``                   An abort ends all requests whose ids begin with the id, and clients may
                           give ids of health checks. Remove when SGLang compares whole ids.
``secrets``                API keys are printed in the log of the arguments and reported by
                           ``/server_info``. Remove when ``resolved_dict`` masks them.
``stop_patterns``          ``stop_regex`` is matched without a time limit in the scheduler. Remove
                           when SGLang bounds it, also in pipeline stages.
========================== ====================================================================

Workarounds in modules of :mod:`sgl_ext.engine` that also serve the extension itself:

========================== ====================================================================
``core.scheduler``         tqdm's default lock is a named semaphore, which a killed scheduler
                           leaves behind. Remove ``set_lock`` when SGLang sets a lock of threads.
``front.errors``           Routes answer 500 and log a traceback for values that they cannot read,
                           and name the server's source files in other answers. Remove ``Malformed``
                           and the hooks when they answer 400.
``front.routes``           ``auth_level`` is looked up among the application's own routes only.
                           Remove ``add_routes`` when it is found for included routers too.
``launch.run_directory``   Sockets and shared memory are left behind by the launcher and by killed
                           workers. Remove when SGLang removes both.
========================== ====================================================================
"""
