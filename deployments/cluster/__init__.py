"""Baton's own Ray on one host: isolated, closed to the network, and gone when it is stopped.

`local.LocalCluster` is what the rest of Baton uses. Each other file tells one part of it:

    environment  the settings that Ray and Serve read at import
    instance     a directory that one process owns, and what a killed owner left in it
    ports        the ports an instance takes beside its HTTP port
    processes    whose process is whose; ending them; the watchdog for a killed owner
    haproxy      the launcher that narrows what HAProxy listens on
    worker_hook  the same for the gRPC servers of replicas
    ray_node     starting and stopping Ray and Serve; every private name of Ray that is used
    serve_config what Serve would silently ignore in a config
    listeners    who listens wider than allowed
    errors       the tree of this package's errors
"""
