"""Checks and errors of requests in the process of SGLang's HTTP server and tokenizer."""
