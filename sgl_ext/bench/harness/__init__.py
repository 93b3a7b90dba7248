"""Servers, reports and samples that every benchmark shares."""
