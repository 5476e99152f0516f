"""Ready vertex programs, one file per paper.

Each program is a frozen dataclass. `init(key)` returns its initial parameters, `__call__(params, v)` computes one vertex, and
`vertex_function()` returns the `cavs.VertexFunction` for `cavs.run`. Programs of several vertex functions have `run` instead.

Docstrings write shapes with H for `hidden`, E for `inputs`, V for the number of vertices and G for the number of graphs.
"""

from cavs.vertex_programs._choose import (
    PROGRAMS as PROGRAMS,
    ProgramError as ProgramError,
    Sizes as Sizes,
    check_fit as check_fit,
    choose_program as choose_program,
    complete as complete,
    create_program as create_program,
    run_program as run_program,
)
from cavs.vertex_programs._dropout import (
    RowKeys as RowKeys,
    dropout as dropout,
    split_key as split_key,
    vertex_keys as vertex_keys,
)
from cavs.vertex_programs._spelling import (
    spelled_chains as spelled_chains,
    spelled_in as spelled_in,
    spelled_sources as spelled_sources,
)
from cavs.vertex_programs.bidirectional_tree_lstm import BidirectionalTreeLSTM as BidirectionalTreeLSTM
from cavs.vertex_programs.bilstm import BiLSTM as BiLSTM
from cavs.vertex_programs.bilstm_tagger import BiLSTMTagger as BiLSTMTagger
from cavs.vertex_programs.binary_tree_lstm import BinaryTreeLSTM as BinaryTreeLSTM
from cavs.vertex_programs.char_bilstm_tagger import CharBiLSTMTagger as CharBiLSTMTagger
from cavs.vertex_programs.child_sum_tree_lstm import ChildSumTreeLSTM as ChildSumTreeLSTM
from cavs.vertex_programs.dagnn import DAGNN as DAGNN
from cavs.vertex_programs.elman_rnn import ElmanRNN as ElmanRNN
from cavs.vertex_programs.encoder_decoder import EncoderDecoder as EncoderDecoder, greedy as greedy
from cavs.vertex_programs.glyph_tree_lstm import GlyphTreeLSTM as GlyphTreeLSTM
from cavs.vertex_programs.gru import GRU as GRU
from cavs.vertex_programs.lattice_lstm import LatticeLSTM as LatticeLSTM
from cavs.vertex_programs.lstm import LSTM as LSTM
from cavs.vertex_programs.multi_layer_lstm import MultiLayerLSTM as MultiLayerLSTM
from cavs.vertex_programs.nary_tree_lstm import NaryTreeLSTM as NaryTreeLSTM
from cavs.vertex_programs.reset_lstm import ResetLSTM as ResetLSTM
from cavs.vertex_programs.rvnn import RvNN as RvNN
from cavs.vertex_programs.td_lstm import TDLSTM as TDLSTM
from cavs.vertex_programs.td_rnn import TDRNN as TDRNN
from cavs.vertex_programs.tree_fc import TreeFC as TreeFC
