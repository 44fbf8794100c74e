"""Prompts as text, for servers that take no token ids: one short English word for each token.

Such a word is one token of most tokenizers, and words are divided at spaces, so that prompts with equal words at their
begin have equal tokens there.
"""

from __future__ import annotations

from typing import Final

from tokenlake_bench.workload import Tokens

_TEXT: Final = """
    the of and to in is that for it was on are as with they be at one have this from or had by hot but some what there
    we can out other were all your when up use word how said an each she which do their time if will way about many then
    them would write like so these her long make thing see him two has look more day could go come did number sound no
    most people my over know water than call first who may down side been now find any new work part take get place made
    live where after back little only round man year came show every good me give our under name very through just form
    much great think say help low line before turn cause same mean differ move right boy old too does tell sentence set
    three want air well also play small end put home read hand port large spell add even land here must big high such
    follow act why ask men change went light kind off need house picture try us again animal point mother world near
    build self earth father head stand own page should country found answer school grow study still learn plant cover
    food sun four thought let keep eye never last door between city tree cross since hard start might story saw far sea
    draw left late run while press close night real life few stop open seem together next white children begin got walk
    example ease paper often always music those both mark book letter until mile river car feet care second group carry
    took rain eat room friend began idea fish mountain north once base hear horse cut sure watch color face wood main
"""
WORDS: Final = tuple(dict.fromkeys(_TEXT.split()))


def text_of(tokens: Tokens) -> str:
    """A text with one word for each token. Equal tokens are equal words."""
    return " ".join([WORDS[token % len(WORDS)] for token in tokens.tolist()])
