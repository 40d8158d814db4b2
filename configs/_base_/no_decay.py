# No weight decay applies to norms, DTN parameters, position embeddings, position bias tables and class tokens.
no_decay = dict(
    custom_keys={
        name: dict(decay_mult=0.0)
        for name in (
            *('norm', 'pos_embed', 'cls_token', 'cls_pos'),
            *('relative_position_bias_table', 'attention_biases', 'rpe.position'),
        )
    },
)
