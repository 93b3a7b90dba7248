"""Servers under mixed load, compared with stock SGLang answer by answer."""
