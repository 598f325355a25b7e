"""Text in and out of token ids: tokenizer, chat template, incremental detokenization, stop strings.

Loads neither torch nor transformers: Front starts fast and stays small.
"""
