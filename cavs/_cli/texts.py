"""The help texts: formats of files, and examples of each command."""

FORMATS = """files of graphs, by the end of the name, optionally followed by .gz:
  .txt .ptb .trees .mrg  bracketed trees with a label at each vertex: (3 (2 not) (1 (1 bad) (2 .)))
  .conllu                dependency trees; the label of a word is its part of speech
  .jsonl                 any graphs: {"children": [[], [], [0, 1]], "inputs": ["a", "b", null], "labels": [0, 1, 1]}
  .bench .blif           netlists; gates by kind; the label, which is simulated, is how often a gate is 1 for random inputs
  .npz                   files written by cavs.io.save_npz
"""

TAGGED = """files of tagged sentences (--task tag), recognised by name or content, optionally followed by .gz:
  .conllu                the tag is UPOS; for another column write --column xpos
  one word per line      columns, blank lines between sentences; the tag is the last column, or --column N
  word|TAG word|TAG      one sentence per line
"""

PAIRS = """files of sentence pairs (--task nmt), optionally followed by .gz:
  source TAB target      or `source ||| target`; one pair per line, words separated by white space
"""

TRAIN = f"""examples:
  cavs train                                          a Tree-LSTM on the reviews shipped with cavs; under a minute
  cavs train train.txt --dev dev.txt --test test.txt  your own trees
  cavs train parses.conllu --program child-sum --loss all
  cavs train --task dag a.bench b.bench --dev c.bench how often a gate is 1 (by simulation); any other DAGs in .jsonl
  cavs train --task regress a.blif --dev b.blif       the same as a number
  cavs train train.txt --embeddings glove.6B.300d.txt.gz --dropout 0.5
  cavs train --task tag train.conllu --dev dev.conllu parts of speech, with a BiLSTM that spells rare words
  cavs train --task tag ner.txt --dev ner.dev.txt     entities (O, B-PER, I-PER, ...), scored by F1 as conlleval does
  cavs train --task lm sentences.txt --hidden 256     an LSTM language model over text, one sentence per line
  cavs train --task nmt pairs.tsv --dev dev.tsv       an encoder-decoder with attention; cavs predict then translates
  cavs train --task regress designs.jsonl             numbers: {{"children": [[], [0]], "label": 0.73}}
  cavs train --resume runs/reviews                    resume a stopped run; the result is bitwise the same
  cavs train --resume runs/reviews --epochs 40        train longer
  cavs train --config my.toml --seed 2                options from a file: train = "trees.txt", hidden = 200, ...

Ctrl-C (or SIGTERM) stops after the current step, saves, and prints the command that resumes.

{FORMATS}
{TAGGED}
{PAIRS}
A vertex reads a row of a table of vectors: that of its word or, if the file has no inputs, of its kind. A step updates only
the rows that its batch reads. With adam this is "lazy" Adam: the moments of a word do not decay while the word is not read.

Compiled code is cached in ~/.cache/cavs. JAX_COMPILATION_CACHE_DIR selects another folder, and
JAX_ENABLE_COMPILATION_CACHE=false disables the cache. Bitwise reproducible results on a GPU need
XLA_FLAGS=--xla_gpu_deterministic_ops=true.
"""

PREDICT = f"""examples:
  cavs predict runs/reviews new.txt
  cavs predict runs/reviews new.txt --vertices        every vertex of a tree, with the words of its phrase
  cavs predict runs/reviews new.txt --json --probabilities
  cavs predict runs/reviews new.txt --out labels.tsv
  cavs predict runs/sentences new.txt                 a language model: scores each sentence
  cavs predict runs/ner new.txt                       a tagger: word|TAG word|TAG, one sentence per line
  cavs predict runs/pairs new.txt                     a translator: translates each line
  echo "the film is good" | cavs predict runs/ner -   reads standard input

The output is a table with tabs between its cells. The first line names the columns:

  classifier      graph, label, probability, text; with --vertices a line per vertex: graph, vertex, label, probability, text
  tagger          sentence, text; with --vertices a line per word: sentence, word, label, probability, text
  language model  sentence, log_probability, perplexity, text; with --vertices a line per word and its log_probability
  translator      sentence, text

Graphs, sentences and vertices are numbered from 0. --json writes an object with these keys on each line instead.

Taggers, language models, translators, and classifiers of --program lstm, gru or elman-rnn read plain text, one sentence per
line. Words that do not occur in the training data are read as unknown, or spelled letter by letter. The folder of the run is
sufficient: it contains the parameters (.npz) and JSON.

{FORMATS}"""

EVALUATE = f"""examples:
  cavs evaluate runs/reviews test.txt                 accuracy, F1 of each label, and the confusion matrix
  cavs evaluate runs/reviews test.txt --out scores.png
  cavs evaluate runs/ner test.txt --json              accuracy, F1 of each type of entity, as conlleval computes it
  cavs evaluate runs/sentences test.txt               a language model: perplexity
  cavs evaluate runs/pairs test.tsv                   a translator: perplexity, BLEU and chrF (needs sacrebleu)

{FORMATS}
{TAGGED}
{PAIRS}"""

INSPECT = f"""{FORMATS}
{TAGGED}
{PAIRS}
text (--task lm): one sentence per line
"""

COMPLETION = """write one of these into the file that your shell reads at start-up:
  bash  (~/.bashrc)                        eval "$(cavs completion bash)"
  zsh   (~/.zshrc)                         eval "$(cavs completion zsh)"
  fish  (~/.config/fish/config.fish)       cavs completion fish | source
"""
