"""HTTP, Ray Serve and the command line: the only package that imports ray."""
