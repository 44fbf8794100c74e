"""Integrations, one package per engine. Importing this package imports no engine."""
