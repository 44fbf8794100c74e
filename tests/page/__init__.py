"""The page of a node, in headless Chromium and over HTTP, against real daemons."""
