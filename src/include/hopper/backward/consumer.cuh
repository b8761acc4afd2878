// What a consumer warpgroup holds: gradients of its 64 keys, the scores in hand, and how many query blocks
// and items it has passed, from which slots and phases follow. mainloop.cuh puts its moves in order.
#pragma once

#include "common/backward/ahead_of_columns.cuh"
#include "common/backward/element.cuh"
#include "common/kept_weights.cuh"
#include "common/softcap.cuh"
#include "hopper/backward/epilogue.cuh"
#include "hopper/backward/kept_sums.cuh"
#include "hopper/backward/products.cuh"
#include "hopper/backward/unseen_rows.cuh"
#include "hopper/mask_tile.cuh"

namespace flash::hopper {

FLASH_DEVICE float2 load_shared_float2(uint32_t address) {
    float2 values;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(values.x), "=f"(values.y)
                 : "r"(address)
                 : "memory");
    return values;
}

inline constexpr int kNoTile = -1;

template <typename Kernel>
struct BackwardConsumer {
    static constexpr int B_r = Kernel::B_r, B_c = Kernel::B_c;
    static constexpr int kQStages = Kernel::q_stages, kKStages = Kernel::k_stages,
                         kVStages = Kernel::v_stages;
    static constexpr int kPairs = B_r / 8;  // pairs of neighbouring queries, of one key row of a thread
    static constexpr int kDqRegisters = Kernel::dq_part_floats / Kernel::warpgroup_threads;
    static constexpr int kDqTiles = kDqRegisters / 4;  // of 8 columns
    using Known = AheadOfColumns<typename Kernel::Mod, kPairs>;
    // Whether P is made as by a kernel without functions, of scores that these have hidden or replaced.
    static constexpr bool kUsualP =
        !Kernel::has_mod || Kernel::hides_scores || (Kernel::replaces_scores && !Kernel::drops);
    // Where functions replace 64 x 128 scores, nothing has registers beside them.
    static constexpr bool kLseAhead =
        Kernel::cfg.lse_ahead && kUsualP && !(Kernel::replaces_scores && B_r > kWarpgroupRows);

    using KeptWeights = std::conditional_t<Kernel::drops, KeptOfKeys<B_r / 16>, AllKept>;

    const BackwardKernelArgs &args;
    const BackwardSharedMemory<Kernel> smem;
    const BackwardProducts<Kernel> products;
    const int warpgroup, lane, warp;

    float rmem_dK[Kernel::d_head / 2];    // (64, d)
    float rmem_dV[Kernel::d_head_v / 2];  // (64, d_v)
    float rmem_S[B_r / 2];  // (64, B_r): S^T, then P^T; with softcap tanh, then what dS is made of
    float2 rmem_lse[kLseAhead ? kPairs : 1];
    [[no_unique_address]] KeptWeights stays;  // of the block in hand
    [[no_unique_address]] Known known;        // of the next scores, before they are there
    uint32_t blocks = 0, items = 0;           // passed
    BackwardItem item;
    int q_block;
    int query_head;  // of the block in hand; kept with a mod alone
    TileKind kind;   // what the mask of the user's leaves of it, where it is told
    int dq_tile;     // of the block in hand: its first of 16 rows
    // Of the block whose dQ leaves next, with late_dq the one before: the warp's tile, or with keeps_dq more.
    int noted_dq_tile = kNoTile;
    KeptPart kept{};

    FLASH_DEVICE BackwardConsumer(const BackwardKernelArgs &kernel_args,
                                  const BackwardSharedMemory<Kernel> &shared, int index)
        : args(kernel_args),
          smem(shared),
          products(shared, index),
          warpgroup(index),
          lane(threadIdx.x % kWarpSize),
          warp(threadIdx.x % Kernel::warpgroup_threads / kWarpSize) {}

    // ---------------------------------------------------------------- slots
    // x, of which the compiler now knows that it is the same in the whole warp: without the zero, which it
    // cannot know, it would prove the shuffle needless.
    FLASH_DEVICE uint32_t uniform_word(uint32_t x) const {
        return __shfl_sync(kAllLanes, x + static_cast<uint32_t>(args.zero), 0);
    }
    FLASH_DEVICE static uint32_t slot(uint32_t passed, int stages) { return passed % stages; }
    FLASH_DEVICE static uint32_t phase(uint32_t passed, int stages) { return passed / stages & 1; }

    FLASH_DEVICE void release(uint32_t barrier) const {
        if (arrives_for_warp(lane)) mbarrier_arrive(barrier);
    }

    // ---------------------------------------------------------------- turns
    FLASH_DEVICE void await_turn() const {
        if (Kernel::cfg.ping_pong) {
            named_barrier_sync(named_barrier::kTurn + warpgroup, 2 * Kernel::warpgroup_threads);
        }
    }
    FLASH_DEVICE void pass_turn() const {
        if (Kernel::cfg.ping_pong) {
            named_barrier_arrive(named_barrier::kTurn + (warpgroup ^ 1), 2 * Kernel::warpgroup_threads);
        }
    }

    // ---------------------------------------------------------------- items
    FLASH_DEVICE void await_item() {
        mbarrier_wait(smem.k_full(slot(items, kKStages)), phase(items, kKStages));
    }

    // The item in hand, of K's slot: bounds of loops must be known to be uniform.
    FLASH_DEVICE void take_item() {
        item = read_item(smem.item(slot(items, kKStages)));
        item.n_steps = uniform_word(item.n_steps);
        q_block = item.first_block;
        if constexpr (Kernel::has_mod) query_head = item.head * args.group;
        dq_tile = first_dq_tile<Kernel>(args, item) + item.first_block * Kernel::dq_row_tiles;
    }

    FLASH_DEVICE void go_to_next_block() {
        ++q_block;
        dq_tile += Kernel::dq_row_tiles;
        if (q_block == item.end_block) {
            q_block = item.first_block;
            if constexpr (Kernel::has_mod) ++query_head;
            dq_tile += args.dq_tiles - item.visited_blocks() * Kernel::dq_row_tiles;
        }
    }

    FLASH_DEVICE int first_key_of_warpgroup() const {
        return item.tile * B_c + (Kernel::split ? 0 : warpgroup * kWarpgroupRows);
    }

    // Of the thread's two, the upper one.
    FLASH_DEVICE int first_key() const { return first_key_of_warpgroup() + warp * 16 + lane / 4; }

    FLASH_DEVICE void clear_gradients() {
#pragma unroll
        for (int i = 0; i < Kernel::d_head / 2; ++i) rmem_dK[i] = 0.f;
#pragma unroll
        for (int i = 0; i < Kernel::d_head_v / 2; ++i) rmem_dV[i] = 0.f;
    }

    FLASH_DEVICE void store_dv() const {
        const float scale = Kernel::p_unit * weight_scale<typename Kernel::Mod>(args);
        store_gradient<Kernel, Kernel::d_head_v>(rmem_dV, scale, args.dv, args.dv_strides, args, item,
                                                 first_key(), lane, args.d_head_v);
    }
    FLASH_DEVICE void store_dk() const {
        store_gradient<Kernel, Kernel::d_head>(rmem_dK, args.softmax_scale * Kernel::p_unit, args.dk,
                                               args.dk_strides, args, item, first_key(), lane, args.d_head);
    }

    // ---------------------------------------------------------------- rows that take no part
    static constexpr bool kMasks = Kernel::traits.causal || Kernel::traits.window;
    // Whether scores of what is no query, or no key, become -inf. Under a mask P becomes 0, where the LSE of
    // a query that does not see the key may be NaN.
    static constexpr bool kMasksScores = Kernel::replaces_scores && !kMasks;

    // Of Q and dO of the block in hand, whose scores are there.
    FLASH_DEVICE void clear_unseen_queries() const {
        if constexpr (kMasks) {
            Range seeing = args.visible<Kernel::traits>(item.seq_len_q, item.seq_len_k).seeing_rows();
            if (seeing.end == item.seq_len_q)
                seeing.end = q_block * B_r + B_r;  // rows past the end are zeros
            const uint32_t q_slot = slot(blocks, kQStages);
            const RowsOfTile of_tile{q_block * B_r, 0, B_r};
            if (!has_unused(seeing, of_tile)) return;
            clear_unused<B_r, Kernel::d_head>(smem.q(q_slot), seeing, of_tile);
            clear_unused<B_r, Kernel::d_head_v>(smem.dout(q_slot), seeing, of_tile);
            show_cleared(named_barrier::kWarpgroup + warpgroup);
        }
    }

    // Of the warpgroup's rows of K and V. Only windows leave keys that nobody sees.
    FLASH_DEVICE void clear_unseen_keys() const {
        if constexpr (Kernel::traits.window) {
            Range seen = args.visible<Kernel::traits>(item.seq_len_q, item.seq_len_k).seen_keys();
            if (seen.end == item.seq_len_k) seen.end = item.tile * B_c + B_c;
            const RowsOfTile of_tile{item.tile * B_c, warpgroup * kWarpgroupRows, kWarpgroupRows};
            if (!has_unused(seen, of_tile)) return;
            clear_unused<B_c, Kernel::d_head>(smem.k(slot(items, kKStages)), seen, of_tile);
            clear_unused<B_c, Kernel::d_head_v>(smem.v(slot(items, kVStages)), seen, of_tile);
            show_cleared(named_barrier::kWarpgroup + warpgroup);
        }
    }

    // ---------------------------------------------------------------- probabilities
    // Of the block whose scores are computed.
    FLASH_DEVICE void read_ahead() {
        if constexpr (Kernel::hides_scores) {
            // Through a shuffle: branches by it are the whole warp's.
            const uint32_t address = smem.kind(slot(blocks, kQStages), Kernel::split ? 0 : warpgroup);
            kind = static_cast<TileKind>(uniform_word(load_shared_int(address)));
        }
        if constexpr (kLseAhead) {
            const uint32_t address = smem.lse(slot(blocks, kQStages)) + (lane & 3) * 8;
#pragma unroll
            for (int j = 0; j < kPairs; ++j) rmem_lse[j] = load_shared_float2(address + j * 32);
        }
    }

    FLASH_DEVICE bool needs_mask() const {
        const int first_key = first_key_of_warpgroup();
        // A function may make anything of the score of a query that is none.
        if (Kernel::replaces_scores && q_block * B_r + B_r > item.seq_len_q) return true;
        return !args.visible<Kernel::traits>(item.seq_len_q, item.seq_len_k)
                    .sees_all(q_block * B_r, q_block * B_r + B_r - 1,
                              {first_key, first_key + kWarpgroupRows});
    }

    // Whether no query of the block in hand sees a key of the warpgroup.
    FLASH_DEVICE bool sees_nothing() const {
        const int first_key = first_key_of_warpgroup();
        const Range rows = args.visible<Kernel::traits>(item.seq_len_q, item.seq_len_k)
                               .rows_of({first_key, min(first_key + kWarpgroupRows, item.seq_len_k)});
        return rows.end <= q_block * B_r || rows.begin >= q_block * B_r + B_r;
    }

    // S -> P, rounded into rmem_P, and with half_p into rmem_half. What stays in rmem_S is P in float32, with
    // softcap times the derivative of the cap, so that dS is the gradient of the score before the cap.
    FLASH_DEVICE void probabilities(uint32_t (&rmem_P)[B_r / 4], uint32_t (&rmem_half)[B_r / 4]) {
        if constexpr (!kUsualP) return modified_probabilities(rmem_P, rmem_half);
        if constexpr (Kernel::traits.softcap) cap_any_scores(rmem_S, args.score_factor, args.exponent_factor);
        if (!kMasksScores && needs_mask()) {
            exponentials<true>(rmem_P, rmem_half);
        } else {
            exponentials<false>(rmem_P, rmem_half);
        }
    }

    // Of the block whose scores are on their way: what functions of the user's let a warp know of them.
    FLASH_DEVICE void find_ahead() {
        if constexpr (Kernel::knows_ahead) {
            const auto &captured = mod_of<typename Kernel::Mod>(args).captured;
            const int query = q_block * B_r;
            known.read(captured, item.batch, query_head, query, first_key_of_warpgroup() + warp * 16, lane);
            if constexpr (Kernel::shares_diagonals) {
                const HeadMod<typename Kernel::Mod> mod(captured, item.batch, query_head);
                const int between = first_key_of_warpgroup() - query;
                meet_warpgroup();  // those of the block before have been read
                Kernel::Diagonals::find(smem.diagonals(warpgroup), warp * kWarpSize + lane,
                                        [&](int distance) { return mod.diagonal(between + distance); });
            }
            const int rows = B_r / 4;  // of a warp, so that a warpgroup fetches all
            Known::prefetch(captured, item.batch, query_head, query + B_r, first_key_of_warpgroup(),
                            warp * rows, rows, lane);
        }
    }

    // The warps of a warpgroup wait for each other.
    FLASH_DEVICE void meet_warpgroup() const {
        named_barrier_sync(named_barrier::kWarpgroup + warpgroup, Kernel::warpgroup_threads);
    }

    // S as functions of the user's leave it, where that is all that they change. No product is in flight:
    // branches would cost registers that only wait for it.
    FLASH_DEVICE void modify_scores() {
        if constexpr (Kernel::hides_scores) hide_scores();
        if constexpr (Kernel::replaces_scores) replace_scores();
    }

    // S as functions make it, scaled; -inf where they hide it.
    FLASH_DEVICE void replace_scores() {
        using Mod = HeadMod<typename Kernel::Mod>;
        const Mod mod(mod_of<typename Kernel::Mod>(args).captured, item.batch, query_head);
        const int key = first_key();
        const typename Mod::Column keys[2] = {mod.column(key), mod.column(key + 8)};
        known.arrange();
        if constexpr (Kernel::shares_diagonals) meet_warpgroup();
        float diagonal[2][2] = {};  // of the second row and of the first
        if constexpr (Kernel::knows_ahead) find_diagonals(mod, -1, diagonal[0]);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            if constexpr (Kernel::knows_ahead) find_diagonals(mod, j, diagonal[1]);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int query = q_block * B_r + 8 * j + 2 * (lane & 3) + c;
                const typename Mod::Row row = mod.row(query);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float &score = rmem_S[4 * j + 2 * r + c];
                    const float given = score * args.score_factor;
                    if constexpr (Kernel::knows_ahead) {
                        score = mod.score_ahead(row, keys[r], known.at(r, j, c, diagonal[1 - r][c]), given,
                                                query, key + 8 * r);
                    } else {
                        score = mod.score(row, keys[r], given, query, key + 8 * r);
                    }
                }
            }
#pragma unroll
            for (int c = 0; c < 2; ++c) diagonal[0][c] = diagonal[1][c];
        }
        if (kMasksScores && needs_mask()) mask_elements(-INFINITY);
    }

    // What a mod knows of the distances of the thread's first row in square j; its second row, 8 keys
    // further, has those of the square before.
    FLASH_DEVICE void find_diagonals(const HeadMod<typename Kernel::Mod> &mod, int j,
                                     float (&diagonal)[2]) const {
        if constexpr (has_diagonal<typename Kernel::Mod>) {
            const int own = warp * 16 + lane / 4 - 2 * (lane & 3);
            if constexpr (Kernel::shares_diagonals) {
                const uint32_t address = smem.diagonals(warpgroup) + Kernel::Diagonals::place(own - 8 * j);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    diagonal[c] = __uint_as_float(load_shared_word(address - c * 4));
                }
            } else {
                const int distance = first_key_of_warpgroup() - q_block * B_r + own - 8 * j;
#pragma unroll
                for (int c = 0; c < 2; ++c) diagonal[c] = mod.diagonal(distance - c);
            }
        }
    }

    // S = +-inf where a mask that is all of the user's functions hides it.
    FLASH_DEVICE void hide_scores() {
        if constexpr (Kernel::hides_scores) {
            if (kind == TileKind::FULL) return;
            using Mod = HeadMod<typename Kernel::Mod>;
            const Mod mod(mod_of<typename Kernel::Mod>(args).captured, item.batch, query_head);
            const int key = first_key();
            const typename Mod::Column keys[2] = {mod.column(key), mod.column(key + 8)};
            hide_unseen<B_r, 4>(
                rmem_S, lane, kind == TileKind::EMPTY,
                [&](int column) { return mod.row(q_block * B_r + column); },
                [&](const typename Mod::Row &row, int column) {
                    const int query = q_block * B_r + column;
                    return uint32_t{mod.visible(row, keys[0], query, key)} |
                           uint32_t{mod.visible(row, keys[1], query, key + 8)} << 1;
                },
                args.hidden_score());
        }
    }

    // Finds which weights of the block in hand dropout keeps.
    FLASH_DEVICE void draw() {
        if constexpr (Kernel::drops) {
            const Dropout &dropout = mod_of<typename Kernel::Mod>(args).captured.dropout;
            const int query = q_block * B_r + accumulator(computed_here(lane), 0).column;
            stays = KeptWeights(HeadDropout(dropout, item.batch, query_head),
                                [&](int block) { return MatrixCoordinate{first_key(), query + block * 16}; });
        }
    }

    // The same with functions of the user's, element by element: dS is made of P times the derivative, or
    // weights are dropped.
    FLASH_DEVICE void modified_probabilities(uint32_t (&rmem_P)[B_r / 4], uint32_t (&rmem_half)[B_r / 4]) {
        using Mod = HeadMod<typename Kernel::Mod>;
        const Mod mod(mod_of<typename Kernel::Mod>(args).captured, item.batch, query_head);
        const uint32_t address = smem.lse(slot(blocks, kQStages)) + (lane & 3) * 8;
        const typename Mod::Column keys[2] = {mod.column(first_key()), mod.column(first_key() + 8)};
        const Range seeing[2] = {visible_columns(0), visible_columns(1)};
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const float2 lse = kLseAhead ? rmem_lse[j] : load_shared_float2(address + j * 32);
            float p[4], handed_on[4];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int column = 8 * j + 2 * (lane & 3) + c, query = q_block * B_r + column;
                const typename Mod::Row row = mod.row(query);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float score = rmem_S[4 * j + 2 * r + c];
                    const float row_lse = c == 0 ? lse.x : lse.y;
                    Probability P;
                    if constexpr (Kernel::replaces_scores) {
                        P.value = P.handed_on = exp2_approx(fmaf(score, kLog2e, -row_lse));
                    } else {
                        P = mod.probability(row, keys[r], score * args.score_factor, query,
                                            first_key() + 8 * r, row_lse);
                    }
                    if (!seeing[r].has(column)) P = {0.f, 0.f};
                    p[2 * r + c] = P.value;
                    handed_on[2 * r + c] = P.handed_on;
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if constexpr (Kernel::signs_dropped) {
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        float &value = p[2 * r + c];
                        if (!stays.has(j / 2, r, j % 2 * 2 + c)) value = -value;
                        handed_on[2 * r + c] = value;
                    }
                    rmem_P[2 * j + r] = pack_positive<Kernel::dtype>(p[2 * r], p[2 * r + 1]);
                } else {
                    rmem_P[2 * j + r] = pack<Kernel::dtype>(p[2 * r], p[2 * r + 1]);
                }
                if constexpr (Kernel::half_p) {
                    rmem_half[2 * j + r] = pack<Kernel::handed>(handed_on[2 * r], handed_on[2 * r + 1]);
                } else {
                    rmem_S[4 * j + 2 * r] = handed_on[2 * r];
                    rmem_S[4 * j + 2 * r + 1] = handed_on[2 * r + 1];
                }
            }
        }
        if constexpr (Kernel::drops && !Kernel::signs_dropped) drop_rounded(rmem_P);
    }

    // Where no sign tells what is dropped: the bits are found when the scores are gone, and live until dS.
    FLASH_DEVICE void drop_rounded(uint32_t (&rmem_P)[B_r / 4]) {
        draw();
#pragma unroll
        for (int i = 0; i < B_r / 4; ++i) {
            const int j = i / 2, r = i % 2;
            const uint32_t low = stays.has(j / 2, r, j % 2 * 2) ? 0xffffu : 0u;
            const uint32_t high = stays.has(j / 2, r, j % 2 * 2 + 1) ? 0xffff0000u : 0u;
            rmem_P[i] &= low | high;
        }
    }

    // dS from P and dP; with half_p rmem_dS holds P before.
    FLASH_DEVICE void score_gradients(uint32_t (&rmem_dS)[B_r / 4], const uint32_t (&rmem_P)[B_r / 4],
                                      const float (&rmem_dP)[B_r / 2]) const {
        make_score_gradients<false>(rmem_dS, rmem_dP, [&](int i) {
            if constexpr (Kernel::float_p) return float2{rmem_S[i], rmem_S[i + 1]};
            return unpack<Kernel::handed>(Kernel::half_p ? rmem_dS[i / 2] : rmem_P[i / 2]);
        });
    }

    // p(i): elements i and i + 1 of P. kHiddenRows: V and dO may hold NaN where P is 0.
    template <bool kHiddenRows, typename P>
    FLASH_DEVICE void make_score_gradients(uint32_t (&rmem_dS)[B_r / 4], const float (&rmem_dP)[B_r / 2],
                                           const P &p) const {
        const uint32_t address = smem.delta(slot(blocks, kQStages)) + (lane & 3) * 8;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const float2 delta = load_shared_float2(address + j * 32);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = 4 * j + 2 * r;
                float2 pair = p(i);
                float dp[2] = {rmem_dP[i], rmem_dP[i + 1]};
                if constexpr (Kernel::drops) {
                    const float scale = weight_scale<typename Kernel::Mod>(args);
                    const bool kept[2] = {
                        Kernel::signs_dropped ? pair.x > 0.f : stays.has(j / 2, r, j % 2 * 2),
                        Kernel::signs_dropped ? pair.y > 0.f : stays.has(j / 2, r, j % 2 * 2 + 1)};
#pragma unroll
                    for (int c = 0; c < 2; ++c) dp[c] = kept[c] ? dp[c] * scale : 0.f;
                    if constexpr (Kernel::signs_dropped) pair = {fabsf(pair.x), fabsf(pair.y)};
                }
                float ds[2] = {pair.x * (dp[0] - delta.x), pair.y * (dp[1] - delta.y)};
                if (kHiddenRows && pair.x == 0.f) ds[0] = 0.f;
                if (kHiddenRows && pair.y == 0.f) ds[1] = 0.f;
                rmem_dS[i / 2] = pack<Kernel::dtype>(ds[0], ds[1]);
            }
        }
    }

    // ---------------------------------------------------------------- dS and dQ
    FLASH_DEVICE void store_score_gradients(const uint32_t (&rmem_dS)[B_r / 4]) const {
        const uint32_t row = warpgroup * kWarpgroupRows + warp * 16 + (lane & 15);
        const uint32_t address = smem.ds(slot(blocks, 2)) + row * kPanelRowBytes +
                                 swizzled<uint32_t>(lane & 7, lane >> 4) * kChunkBytes;
#pragma unroll
        for (int k = 0; k < B_r / 16; ++k) {
            stmatrix_x4((address ^ (k % 4 * 2 * kChunkBytes)) + k / 4 * B_c * kPanelRowBytes, rmem_dS[4 * k],
                        rmem_dS[4 * k + 1], rmem_dS[4 * k + 2], rmem_dS[4 * k + 3]);
        }
    }

    // The tile of dq_sums with the warp's 16 rows of the block in hand; kNoTile: they are past the end.
    FLASH_DEVICE int dq_tile_of_warp() const {
        const int row_tile = (Kernel::dq_parts_are_rows ? warpgroup * 4 : 0) + warp;
        return q_block * B_r + row_tile * kMmaM < item.seq_len_q ? dq_tile + row_tile : kNoTile;
    }

    // For the reducing warp, when the part before has been read.
    FLASH_DEVICE void stage_dq(const float (&rmem_dQ)[kDqRegisters]) const {
        const uint32_t address = smem.dq(warpgroup) + (warp * kDqTiles * kWarpSize + lane) * 16;
#pragma unroll
        for (int c = 0; c < kDqTiles; ++c) {
            store_shared(address + c * kWarpSize * 16,
                         make_int4(__float_as_int(rmem_dQ[4 * c]), __float_as_int(rmem_dQ[4 * c + 1]),
                                   __float_as_int(rmem_dQ[4 * c + 2]), __float_as_int(rmem_dQ[4 * c + 3])));
        }
        fence_async_proxy();  // the bulk reduction must see what was staged
    }
    FLASH_DEVICE void await_stage() const {
        named_barrier_sync(named_barrier::kStageFree + warpgroup, Kernel::warpgroup_threads + kWarpSize);
    }
    FLASH_DEVICE void pass_stage() const {
        named_barrier_arrive(named_barrier::kStaged + warpgroup, Kernel::warpgroup_threads + kWarpSize);
    }

    // A warp holds 16 rows and 48 or 64 columns, in tiles of 8, of which only the tensor's have sums.
    FLASH_DEVICE void send_dq(const float (&rmem_dQ)[kDqRegisters], int tile) const {
        if constexpr (Kernel::stages_dq) {
            await_stage();
            stage_dq(rmem_dQ);
            pass_stage();
        } else {
            if (tile == kNoTile) return;
            const int column_tile = Kernel::dq_parts_are_rows ? 0 : warpgroup * kDqTiles;
            const int columns = Kernel::traits.padded_head ? args.d_head : Kernel::d_head;
            float *sums =
                args.dq_sums + int64_t{tile} * (kMmaM * columns) + column_tile * kSumTileFloats + lane * 4;
#pragma unroll
            for (int c = 0; c < kDqTiles; ++c) {
                if (Kernel::traits.padded_head && (column_tile + c) * kMmaN >= columns) break;
                add_global_floats(sums + c * kSumTileFloats, rmem_dQ[4 * c], rmem_dQ[4 * c + 1],
                                  rmem_dQ[4 * c + 2], rmem_dQ[4 * c + 3]);
            }
        }
    }

  private:
    template <bool kMasked>
    FLASH_DEVICE void exponentials(uint32_t (&rmem_P)[B_r / 4], uint32_t (&rmem_half)[B_r / 4]) {
        const uint32_t address = smem.lse(slot(blocks, kQStages)) + (lane & 3) * 8;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const float2 lse = kLseAhead ? rmem_lse[j] : load_shared_float2(address + j * 32);
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                p[i] =
                    exp2_approx(fmaf(rmem_S[4 * j + i], args.exponent_factor, i % 2 == 0 ? -lse.x : -lse.y));
                const float tanh = rmem_S[4 * j + i];
                rmem_S[4 * j + i] = Kernel::traits.softcap ? p[i] * (1.f - tanh * tanh) : p[i];
            }
            if (!kMasked || Kernel::traits.softcap) {
                round_pair(rmem_P, rmem_half, 2 * j, p[0], p[1]);
                round_pair(rmem_P, rmem_half, 2 * j + 1, p[2], p[3]);
            }
        }
        if constexpr (!kMasked) return;
        mask_elements(0.f);
        if constexpr (Kernel::traits.softcap) {
            mask_packed(rmem_P);
        } else {
#pragma unroll
            for (int i = 0; i < B_r / 4; ++i) {
                round_pair(rmem_P, rmem_half, i, rmem_S[2 * i], rmem_S[2 * i + 1]);
            }
        }
    }

    static FLASH_DEVICE void round_pair(uint32_t (&rmem_P)[B_r / 4], uint32_t (&rmem_half)[B_r / 4], int i,
                                        float first, float second) {
        rmem_P[i] = pack<Kernel::dtype>(first, second);
        if constexpr (Kernel::half_p) rmem_half[i] = pack<DType::FP16>(first, second);
    }

    // Columns of the block in hand that see the thread's key of row r.
    FLASH_DEVICE Range visible_columns(int r) const {
        const int key = first_key() + 8 * r;
        const Range rows =
            args.visible<Kernel::traits>(item.seq_len_q, item.seq_len_k).rows_of({key, key + 1});
        const int first_row = q_block * B_r;
        return {rows.begin - first_row, key < item.seq_len_k ? rows.end - first_row : 0};
    }

    // What does not see, or is not seen, becomes `hidden`.
    FLASH_DEVICE void mask_elements(float hidden) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Range columns = visible_columns(r);
            keep_columns<B_r, true>(rmem_S, r, lane, columns.end, columns.begin, hidden);
        }
    }

    FLASH_DEVICE void mask_packed(uint32_t (&rmem_P)[B_r / 4]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Range columns = visible_columns(r);
            const int kept = kept_elements(lane, columns.end), left_out = kept_elements(lane, columns.begin);
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
                const uint32_t low = 2 * j < kept && 2 * j >= left_out ? 0xffffu : 0u;
                const uint32_t high = 2 * j + 1 < kept && 2 * j + 1 >= left_out ? 0xffff0000u : 0u;
                rmem_P[2 * j + r] &= low | high;
            }
        }
    }
};

}  // namespace flash::hopper
