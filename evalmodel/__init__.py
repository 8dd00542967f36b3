"""tileworld: a small vision-language model of the real Qwen2.5-VL architecture, its pictures and its questions.

pictures.py   boards, tables and forms, drawn from a seed
questions.py  what is asked about them, by family
contexts.py   what may stand before a picture, and how it changes
graft.py      a pretrained text decoder inside Qwen2.5-VL
weights.py    the trained difference that ships, and the checkpoint directory it makes
train.py      how it is trained: tower.py first, then lessons.py with hints.py
curve.py      the training log, drawn
"""
