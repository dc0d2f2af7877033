"""Weights from the trainer into live SGLang servers: planned, sent, applied and proven equal.

Imports go down only:

    session.py  the public object, one per trainer rank      config.py  the knobs, which import nothing here
    sync/       one attempt: coordinator, links to servers, trainer and server ranks, code inside SGLang
    transfer/   one rank's work: packing, digests, deltas, the store, transports
    plan/       pure functions of configs and holdings
"""
