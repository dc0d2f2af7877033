"""Reward functions, one file a verifier: `reward_fn(prompt, completions, prompt_ids, completion_ids, **data)`."""
