"""Integrations: one package per engine, and `common` for the parts that all of them use. Importing this package imports
no engine."""
