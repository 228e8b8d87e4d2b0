"""MoE-DisCo: cluster a corpus, train one expert a cluster apart, merge, fine-tune (arXiv 2601.06857)."""
