"""Environments: what a policy acts in, turn by turn. Each runs in a process of its own, by any interpreter.

`base`, `host`, `tool_calls` and the adapters run in that process and import the standard library alone, besides the
package that an adapter is for. `config`, `pool` and `ending` are the trainer's side.
"""
