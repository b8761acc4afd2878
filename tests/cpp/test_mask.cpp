// mask.cuh: visible keys and block ranges, against counting them one by one.
#include <initializer_list>

#include "check.h"
#include "mask.cuh"

using namespace flash;

static bool visible(bool causal, int row, int key, int seq_len_q, int seq_len_k) {
    return key < seq_len_k && (!causal || key <= row + (seq_len_k - seq_len_q));
}

template <ForwardTraits TRAITS>
static void check_lengths(int seq_len_q, int seq_len_k, int B_r, int B_c) {
    const Mask<TRAITS> mask{seq_len_q, seq_len_k};
    for (int row = 0; row < seq_len_q; ++row) {
        int end = 0;
        for (int key = 0; key < seq_len_k; ++key) {
            if (visible(TRAITS.causal, row, key, seq_len_q, seq_len_k)) end = key + 1;
        }
        CHECK(mask.visible_end(row) == end);
    }
    for (int first = 0; first < seq_len_q; first += B_r) {
        const int last = min_of(first + B_r, seq_len_q) - 1;
        const int n_visible = mask.n_visible_blocks(last, B_c);
        const int n_full = mask.n_full_blocks(first, B_c);
        CHECK(n_full <= n_visible);
        for (int block = 0; block < ceil_div(seq_len_k, B_c); ++block) {
            bool any = false, all = true;
            for (int row = first; row <= last; ++row) {
                for (int key = block * B_c; key < (block + 1) * B_c; ++key) {
                    const bool sees = visible(TRAITS.causal, row, key, seq_len_q, seq_len_k);
                    any = any || sees;
                    all = all && sees;
                }
            }
            CHECK(any == (block < n_visible));
            CHECK(all == (block < n_full));
        }
    }
}

int main() {
    constexpr ForwardTraits plain{}, causal{.causal = true};
    for (const int seq_len_q : {1, 2, 15, 16, 17, 63, 64, 100}) {
        for (const int seq_len_k : {0, 1, 31, 32, 33, 64, 100, 130}) {
            check_lengths<plain>(seq_len_q, seq_len_k, 32, 16);
            check_lengths<causal>(seq_len_q, seq_len_k, 32, 16);
            check_lengths<causal>(seq_len_q, seq_len_k, 16, 64);
        }
    }
    CHECK((Mask<causal>{1 << 30, 3}.visible_end(0) == 0));
    return report();
}
