"""Requests and errors in the process that runs SGLang's HTTP server and tokenizer."""
