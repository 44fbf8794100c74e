"""Spans of traced requests for OpenTelemetry, made of the events and instructions of the rules. Imported only where the
setting `otlp` asks for it."""
