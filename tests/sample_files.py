"""A small valid file of each text format, and helpers of the tests that write and read them."""

import gzip

SST = "(3 (2 It) (4 (4 (2 's) (4 good)) (2 .)))\n(2 (2 good) (1 It))\n"

CONLLU = """# sent_id = 1
# text = They buy du pain
1\tThey\tthey\tPRON\tPRP\t_\t2\tnsubj\t2:nsubj\t_
2\tbuy\tbuy\tVERB\tVBP\t_\t0\troot\t0:root\t_
3-4\tdu\t_\t_\t_\t_\t_\t_\t_\t_
3\tde\tde\tADP\tIN\t_\t5\tcase\t_\t_
4\tle\tle\tDET\tDT\t_\t5\tdet\t_\t_
4.1\tnone\t_\t_\t_\t_\t_\t_\t_\t_
5\tpain\tpain\tNOUN\tNN\t_\t2\tobj\t_\t_

1\t_\t_\t_\t_\t_\t0\troot\t_\t_
2\tbuy\tbuy\tVERB\tVBP\t_\t0\troot\t_\t_
"""

BENCH = """# similar to c17
INPUT(G1)
 input ( G2 )
INPUT(G3)
OUTPUT(G7)
OUTPUT(G2)

G7 = nand(G6, G2)   # defined after use
G6 = AND(G1,G3 , G1)
G8 = BUFF(G6)
"""

BLIF = """# a comment
.model top
.inputs a b \\
  c
.outputs y one
.names n1 c y
1- 1
-1 1
.names a b n1
11 1
.names a c n2
-1 1
1- 1
.names one
1
.names a never
.names b a n3
11 1
.end
"""

GOOD = {
    ".txt": SST,
    ".ptb": SST,
    ".trees": SST,
    ".mrg": SST,
    ".conllu": CONLLU,
    ".jsonl": '{"children": [[], [0]]}\n',
    ".bench": BENCH,
    ".blif": BLIF,
}


def write(tmp_path, name, text):
    path = tmp_path / name
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def names(ids, table):
    return [None if i < 0 else table[i] for i in ids.tolist()]
