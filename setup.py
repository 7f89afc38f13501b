"""For tools that still call setup.py. Everything is declared in pyproject.toml."""

from setuptools import setup

setup()
