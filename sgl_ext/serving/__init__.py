"""Servers that a program starts and asks: calibration, the doctor, benchmarks and tests."""
