"""One weight sync: rank 0's coordinator, the trainer's ranks, the servers' ranks and the code inside SGLang.

    trainer rank 0      coordinator.py       phases, failures, the set of servers
                        server_link.py       one server: its order, its store, its state
                        server_control.py    its HTTP endpoints, over http_pipeline.py
    every trainer rank  trainer_rank.py      groups, plan and sender of the rank
    every server rank   sglang_hooks.py      called by SGLang; live_parameters.py binds its parameters
                        server_rank.py       group, plan and receiver of the rank
    both sides          server_order.py      the HTTP request that makes a server join an attempt
                        attempt.py, world.py the values in the store
    the two paths       shard_path.py        exact: shard to shard, by a plan
                        full_tensor_path.py  full: every tensor to every rank

An attempt is one try of a sync. It fails as a whole, and the next one may leave out servers that failed.
"""
