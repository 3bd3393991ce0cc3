{#-
    Merger: applies an increment to a table by key, deletions included, in one MERGE.

    It works on `materialized='incremental'` with `incremental_strategy='merge'`: dbt asks for the SQL that creates
    the table and for the SQL that merges a batch into it, and the two overrides below answer for a model that has
    options under `meta.lakehouse_patterns.merger`. For any other model they hand back what dbt-spark gives.

    What dbt-spark's merge lacks, and why it can't be added around it:
    - a branch for deletions, and the guard that keeps an unknown key's deletion from being inserted;
    - one row a key: Delta refuses two changes of a stored key, and silently inserts both of a new one;
    - NULL keys: `=` never matches them, so that every run would insert them again;
    - an order: an old change that comes late must not win;
    - literal partition values in the ON clause: `target.day = source.day` alone prunes nothing.
-#}

{% macro spark__create_table_as(temporary, relation, compiled_code, language='sql') %}
    {#- First load and full refresh: the same rules as in a merge, there is only nothing to merge with. -#}
    {%- set options = lakehouse_patterns.options('merger') -%}
    {%- if options is not none -%}
        {%- do lakehouse_patterns._merger_require_model(language) -%}
    {%- endif -%}
    {%- if options is none or temporary -%}
        {{ return(dbt.spark__create_table_as(temporary, relation, compiled_code, language)) }}
    {%- endif -%}

    {%- set batch = lakehouse_patterns.batch_view(relation) -%}
    {%- call statement('create_batch_view') -%}
        {{ create_temporary_view(batch, compiled_code) }}
    {%- endcall -%}
    {%- set merger = lakehouse_patterns._merger(options, relation, adapter.get_columns_in_relation(batch)) -%}
    {%- do lakehouse_patterns.quarantine_incomplete(merger, batch) -%}
    {{ return(dbt.spark__create_table_as(
        false, relation, lakehouse_patterns._merger_first_load(merger, batch), language
    )) }}
{% endmacro %}


{% macro spark__get_merge_sql(target, source, unique_key, dest_columns, incremental_predicates) %}
    {%- set options = lakehouse_patterns.options('merger') -%}
    {%- if options is none -%}
        {{ return(dbt.spark__get_merge_sql(target, source, unique_key, dest_columns, incremental_predicates)) }}
    {%- endif -%}

    {%- set merger = lakehouse_patterns._merger(options, target, adapter.get_columns_in_relation(source)) -%}
    {%- do lakehouse_patterns.quarantine_incomplete(merger, source) -%}
    {%- set columns = lakehouse_patterns._merger_written_columns(
        merger, target, adapter.get_columns_in_relation(target)
    ) -%}
    {{ return(lakehouse_patterns._merger_merge(
        merger,
        source,
        target,
        columns,
        lakehouse_patterns._merger_look_up(merger, source, target),
        incremental_predicates or []
    )) }}
{% endmacro %}


{% macro _merger_require_dispatch() %}
    {#-
        The package's on-run-start hook. In a project without our `dispatch`, or with an override of its own, dbt never
        comes here and would ignore the options without a word.
    -#}
    {%- if execute -%}
        {%- for node in graph.nodes.values()
            if ((node.config.get('meta') or {}).get('lakehouse_patterns') or {}).get('merger') is not none -%}
            {#- dbt reads the names of dispatched macros without running anything: they must be literals. -#}
            {%- for name, found in [
                ('get_merge_sql', adapter.dispatch('get_merge_sql', 'dbt')),
                ('create_table_as', adapter.dispatch('create_table_as', 'dbt'))
            ] -%}
                {%- set package = found.macro.package_name -%}
                {%- do lakehouse_patterns.require(
                    package == 'lakehouse_patterns',
                    node.name ~ " has options under meta.lakehouse_patterns.merger, but " ~ name ~ " comes from "
                    ~ package ~ ": dispatch in dbt_project.yml must name lakehouse_patterns before dbt"
                ) -%}
            {%- endfor -%}
        {%- endfor -%}
    {%- endif -%}
{% endmacro %}


{#- Options -#}

{% macro _merger_require_model(language) %}
    {%- for name, value, needed in [
        ('materialized', config.get('materialized'), 'incremental'),
        ('incremental_strategy', config.get('incremental_strategy'), 'merge'),
        ('file_format', config.get('file_format'), 'delta'),
        ('language', language, 'sql')
    ] -%}
        {%- do lakehouse_patterns.require(
            value == needed, "meta.lakehouse_patterns.merger needs " ~ name ~ "='" ~ needed ~ "', got '" ~ value ~ "'"
        ) -%}
    {%- endfor -%}
{% endmacro %}


{% macro _merger(options, relation, batch_columns) %}
    {#- The checked options, the relation they are for, and the batch's column names to data types. -#}
    {%- do lakehouse_patterns.require_known_keys(
        'meta.lakehouse_patterns.merger',
        options,
        ['deletes', 'is_deleted', 'sequence', 'on_null_key', 'nullable_key', 'keep_on_null', 'prune_by']
    ) -%}
    {%- set key = lakehouse_patterns.as_list(config.get('unique_key')) -%}
    {%- set partitions = lakehouse_patterns.as_list(config.get('partition_by')) -%}
    {%- set merger = {
        'relation': relation,
        'types': {},
        'partitions': partitions,
        'key': key,
        'nullable_key': lakehouse_patterns.as_list(options.get('nullable_key')),
        'on_null_key': options.get('on_null_key', 'fail'),
        'sequence': lakehouse_patterns.as_list(options.get('sequence')),
        'deletes': options.get('deletes', 'none'),
        'is_deleted': options.get('is_deleted'),
        'keep_on_null': lakehouse_patterns.as_list(options.get('keep_on_null')),
        'prune_by': lakehouse_patterns.as_list(options.get('prune_by', partitions | select('in', key) | list))
    } -%}
    {%- for column in batch_columns -%}
        {%- do merger.types.update({column.name: column.dtype}) -%}
    {%- endfor -%}

    {%- do lakehouse_patterns.require(
        key | length > 0, 'meta.lakehouse_patterns.merger needs unique_key: the column or columns that never change'
    ) -%}
    {%- do lakehouse_patterns.require_one_of('deletes', merger.deletes, ['none', 'soft', 'hard']) -%}
    {%- do lakehouse_patterns.require_one_of('on_null_key', merger.on_null_key, ['fail', 'quarantine']) -%}
    {%- do lakehouse_patterns.require(
        merger.on_null_key == 'fail' or lakehouse_patterns.required_columns(merger),
        'on_null_key: quarantine has nothing to set aside: every key column is under nullable_key, no sequence is given'
    ) -%}
    {%- do lakehouse_patterns.require(
        (merger.deletes == 'none') == (merger.is_deleted is none),
        "deletes: soft and deletes: hard need is_deleted, and is_deleted needs one of them; got deletes: "
        ~ merger.deletes ~ " and is_deleted: " ~ merger.is_deleted
    ) -%}
    {%- for option, names, allowed in [
        ('nullable_key', merger.nullable_key, key), ('prune_by', merger.prune_by, partitions)
    ] -%}
        {%- for name in names -%}
            {%- do lakehouse_patterns.require(
                name in allowed,
                option ~ " may name only columns of " ~ ('unique_key' if option == 'nullable_key' else 'partition_by')
                ~ " (" ~ (allowed | join(', ')) ~ "), got '" ~ name ~ "'"
            ) -%}
        {%- endfor -%}
    {%- endfor -%}
    {%- set own = key + merger.sequence + ([merger.is_deleted] if merger.is_deleted else []) -%}
    {%- for name in own + merger.prune_by + merger.keep_on_null -%}
        {%- do lakehouse_patterns.require(
            name in merger.types, "the model has no column '" ~ name ~ "'; it has: " ~ (merger.types | join(', '))
        ) -%}
    {%- endfor -%}
    {%- for name in merger.prune_by -%}
        {%- do lakehouse_patterns.require(
            lakehouse_patterns._merger_literal(name, merger.types[name]),
            "prune_by may not name a column of type " ~ merger.types[name] ~ ", got '" ~ name ~ "'"
        ) -%}
    {%- endfor -%}
    {%- for name in merger.keep_on_null -%}
        {%- do lakehouse_patterns.require(
            name not in own,
            "keep_on_null is for attributes; '" ~ name ~ "' is part of unique_key, sequence or is_deleted"
        ) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(
        not merger.keep_on_null or merger.deletes != 'hard',
        'keep_on_null needs deletes: none or deletes: soft: of a row that was removed there is nothing to keep'
    ) -%}
    {%- if merger.is_deleted -%}
        {%- do lakehouse_patterns.require(
            merger.types[merger.is_deleted] == 'boolean',
            "is_deleted must be a boolean, '" ~ merger.is_deleted ~ "' is a " ~ merger.types[merger.is_deleted]
        ) -%}
    {%- endif -%}
    {{ return(merger) }}
{% endmacro %}


{% macro _merger_written_columns(merger, target, target_columns) %}
    {#-
        The columns that a merge inserts and updates: those of the target, so that the batch follows the target's
        schema and not a second column list. Values are cast as Delta stores them: an overflow or a text that is no
        number fails the run, in either ANSI mode.
    -#}
    {%- set inserted, missing = [], [] -%}
    {%- for column in target_columns -%}
        {%- do (inserted if column.name in merger.types else missing).append(column.name) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(
        not missing or config.get('on_schema_change') == 'append_new_columns',
        target ~ ' has columns that the model lacks: ' ~ (missing | join(', '))
        ~ "; they stay as they are with on_schema_change='append_new_columns'"
    ) -%}
    {%- for name in merger.key + merger.sequence + ([merger.is_deleted] if merger.is_deleted else []) -%}
        {%- do lakehouse_patterns.require(
            name in inserted,
            target ~ " has no column '" ~ name ~ "': run the model with on_schema_change='append_new_columns' "
            ~ "or with --full-refresh"
        ) -%}
    {%- endfor -%}

    {%- set updated = get_merge_update_columns(
        config.get('merge_update_columns'), config.get('merge_exclude_columns'), target_columns
    ) -%}
    {%- set updated = updated | map('replace', '`', '') | list if updated else inserted -%}
    {%- for name in merger.sequence + ([merger.is_deleted] if merger.deletes == 'soft' else []) -%}
        {%- do lakehouse_patterns.require(
            name in updated,
            "merge_update_columns and merge_exclude_columns must leave '" ~ name
            ~ "' updated: without it later changes are compared with an old state"
        ) -%}
    {%- endfor -%}
    {{ return({'inserted': inserted, 'updated': updated}) }}
{% endmacro %}


{#- The batch -#}

{% macro _merger_latest(merger, batch, partitions={}, with_known=false) %}
    {#-
        The batch's newest row of each key. Ties are broken by all other columns (a deletion first), so that the
        order in which rows are read decides nothing. A column of keep_on_null has its newest value that is known; with
        a sequence, `lakehouse_patterns_known_<n>` tells from which change, for it may be older than what is stored.

        The checks sit in the key, below everything else: no plan can spare them, drop the row before them, or lose
        a row that its siblings hide. Rows are distributed by the key anyway, for the window; said aloud, it is done for
        a batch of one partition too, so that a check never fails inside the task that writes, under a stack trace.
    -#}
    {%- set order = lakehouse_patterns.quoted_names(merger.sequence) -%}
    {%- if merger.is_deleted -%}
        {%- do order.append(adapter.quote(merger.is_deleted)) -%}
    {%- endif -%}
    {%- for name, type in merger.types.items() if name not in merger.key + merger.sequence + [merger.is_deleted] -%}
        {%- set quoted = adapter.quote(name) -%}
        {%- set sortable = 'map<' not in type and 'variant' not in type -%}
        {%- do order.append(quoted if sortable else 'to_json(struct(' ~ quoted ~ '))') -%}
    {%- endfor -%}
    {%- set key = lakehouse_patterns.quoted_names(merger.key) -%}
    {%- set newest_first -%}
        partition by {{ key | join(', ') }}
                order by {{ (order or key) | join(' desc, ') }} desc
    {%- endset -%}
    {%- set columns = [] -%}
    {%- for name in merger.types -%}
        {%- set known = 'lakehouse_patterns_known_' ~ (merger.keep_on_null.index(name) + 1) if name in merger.keep_on_null -%}
        {%- do columns.append(known ~ '.value as ' ~ adapter.quote(name) if known else adapter.quote(name)) -%}
        {%- do columns.append(known ~ '.at as ' ~ known) if known and with_known -%}
    {%- endfor -%}
    select {{ columns | join(', ') }}
    from (
        select
            *,
            {%- for name in lakehouse_patterns.quoted_names(merger.keep_on_null) %}
            first_value(
                case
                    when {{ name }} is not null
                        then struct(
                            {%- if merger.sequence %}
                            struct({{ lakehouse_patterns.quoted_names(merger.sequence) | join(', ') }}) as at,
                            {%- endif %}
                            {{ name }} as value
                        )
                end
            ) ignore nulls over (
                {{ newest_first }}
                rows between unbounded preceding and unbounded following
            ) as lakehouse_patterns_known_{{ loop.index }},
            {%- endfor %}
            row_number() over (
                {{ newest_first }}
            ) as lakehouse_patterns_rank
        from (
            select
                {%- for name in merger.types %}
                {% if name == merger.key[0] -%}
                    {{ lakehouse_patterns._merger_checked_key(merger, 'batch', partitions) }}
                {%- else -%}
                    batch.{{ adapter.quote(name) }}
                {%- endif %} as {{ adapter.quote(name) }}
                {{- ',' if not loop.last }}
                {%- endfor %}
            from {{ lakehouse_patterns.rows_as_stored(merger, batch) }} as batch
            {{- lakehouse_patterns.without_quarantined(merger, 'batch') | indent(12) }}
            distribute by {{ key | join(', ') }}
        )
    )
    where lakehouse_patterns_rank = 1
{%- endmacro %}


{% macro _merger_checked_key(merger, alias, partitions) %}
    {#-
        The first key column, or the end of the statement at an incomplete row and at a row that came after the
        partitions were looked up: outside of them every row would be taken for a new key.
    -#}
    {%- set key = alias ~ '.' ~ adapter.quote(merger.key[0]) -%}
    {%- set required = lakehouse_patterns.required_columns(merger) -%}
    {%- if required or partitions -%}
        case
            {%- if required %}
            when {{ lakehouse_patterns.is_incomplete(merger, alias) }}
                then {{ lakehouse_patterns.refuse_incomplete(merger, alias, 'row') }}
            {%- endif %}
            {%- if partitions %}
            when not coalesce({{ lakehouse_patterns._merger_pruned(partitions, alias) | join(' and ') }}, false)
                then raise_error(
                    'lakehouse_patterns: the source of {{ merger.relation }} changed while the model was running, run it again'
                )
            {%- endif %}
            else {{ key }}
        end
    {%- else -%}
        {{ key }}
    {%- endif -%}
{%- endmacro %}


{% macro _merger_first_load(merger, batch) %}
    {%- if merger.deletes == 'hard' -%}
        select *
        from (
            {{ lakehouse_patterns._merger_latest(merger, batch) }}
        )
        where not {{ adapter.quote(merger.is_deleted) }}
    {%- else -%}
        {{ lakehouse_patterns._merger_latest(merger, batch) }}
    {%- endif -%}
{%- endmacro %}


{#- The merge -#}

{% macro _merger_look_up(merger, batch, target) %}
    {#-
        What the merge must know beforehand. `partitions`: for each column of prune_by what the batch holds, as SQL:
        {column: {literals: none when there are too many, minimum, maximum, has_null}}, read in one pass over these
        columns alone, which also tells whether the batch `is_empty`. `may_be_stale`: whether a stored row may be as new
        as one of the batch.
    -#}
    {%- if not merger.prune_by -%}
        {{ return({'is_empty': false, 'partitions': {}, 'may_be_stale': merger.sequence | length > 0}) }}
    {%- endif -%}
    {%- set row = run_query(lakehouse_patterns._merger_batch_query(merger, batch)).rows[0] -%}
    {%- if row['row_count'] == 0 -%}
        {{ return({'is_empty': true}) }}
    {%- endif -%}
    {%- set partitions = {} -%}
    {%- for name in merger.prune_by -%}
        {%- do partitions.update({name: {
            'literals': row['literals_' ~ loop.index],
            'minimum': row['minimum_' ~ loop.index],
            'maximum': row['maximum_' ~ loop.index],
            'has_null': row['has_null_' ~ loop.index]
        }}) -%}
    {%- endfor -%}
    {{ return({
        'is_empty': false,
        'partitions': partitions,
        'may_be_stale': lakehouse_patterns._merger_may_be_stale(merger, target, partitions, row['least_sequence'])
    }) }}
{% endmacro %}


{% macro _merger_may_be_stale(merger, target, partitions, least_sequence) %}
    {#-
        Changes mostly come in order, and then Delta's file statistics alone say that no stored row is as new as the
        batch's oldest: no file is read, and a join with the stored keys is spared.
    -#}
    {%- if not (merger.sequence and least_sequence) -%}
        {{ return(merger.sequence | length > 0) }}
    {%- endif -%}
    {{ return(run_query(
        lakehouse_patterns._merger_stale_query(merger, target, partitions, least_sequence)
    ).rows[0]['may_be_stale']) }}
{% endmacro %}


{% macro _merger_stale_query(merger, target, partitions, least_sequence) %}
    {%- set as_new = ['stored.' ~ adapter.quote(merger.sequence[0]) ~ ' >= ' ~ least_sequence] -%}
    select count(*) > 0 as may_be_stale
    from (
        select 1
        from {{ target }} as stored
        where {{ (as_new + lakehouse_patterns._merger_pruned(partitions, 'stored')) | join(' and ') }}
        limit 1
    )
{% endmacro %}


{% macro _merger_batch_query(merger, batch) %}
    {#- Lists of more than 500 literals cost more to parse and compare than the files they spare. -#}
    {%- if merger.sequence -%}
        {%- set sequence_literal = lakehouse_patterns._merger_literal(
            'first_sequence', merger.types[merger.sequence[0]]
        ) -%}
    {%- endif -%}
    select
        row_count,
        {%- for name in merger.prune_by %}
        {%- set type, i = merger.types[name], loop.index %}
        case
            when size(distinct_{{ i }}) <= 500 then array_join(
                transform(sort_array(distinct_{{ i }}), value -> {{ lakehouse_patterns._merger_literal('value', type) }}), ', '
            )
        end as literals_{{ i }},
        {{ lakehouse_patterns._merger_literal('least_' ~ i, type) }} as minimum_{{ i }},
        {{ lakehouse_patterns._merger_literal('greatest_' ~ i, type) }} as maximum_{{ i }},
        nulls_{{ i }} > 0 as has_null_{{ i }},
        {%- endfor %}
        {{ sequence_literal or 'cast(null as string)' }} as least_sequence
    from (
        select
            count(*) as row_count,
            {%- for name in lakehouse_patterns.quoted_names(merger.prune_by) %}
            collect_set({{ name }}) as distinct_{{ loop.index }},
            min({{ name }}) as least_{{ loop.index }},
            max({{ name }}) as greatest_{{ loop.index }},
            count_if({{ name }} is null) as nulls_{{ loop.index }},
            {%- endfor %}
            {{ 'min(' ~ adapter.quote(merger.sequence[0]) ~ ')' if sequence_literal else 'null' }} as first_sequence
        from {{ lakehouse_patterns.rows_as_stored(merger, batch) }}
    )
{% endmacro %}


{% macro _merger_literal(value, type) %}
    {#- SQL that writes a value as a SQL literal, or none for a type that has no safe one. -#}
    {%- if type == 'string' or type.startswith('varchar') or type.startswith('char') -%}
        {{ return("concat('\\'', replace(replace(" ~ value ~ ", '\\\\', '\\\\\\\\'), '\\'', '\\\\\\''), '\\'')") }}
    {%- elif type in ['date', 'timestamp_ntz'] -%}
        {{ return("concat('" ~ type ~ "\\'', " ~ value ~ ", '\\'')") }}
    {%- elif type == 'timestamp' -%}
        {#- A printed timestamp means two instants in the hour when the clocks go back. -#}
        {{ return("concat('timestamp_micros(', unix_micros(" ~ value ~ "), ')')") }}
    {%- elif type in ['tinyint', 'smallint', 'int', 'bigint', 'boolean'] or type.startswith('decimal') -%}
        {{ return("cast(" ~ value ~ " as string)") }}
    {%- endif -%}
    {{ return(none) }}
{% endmacro %}


{% macro _merger_pruned(partitions, alias) %}
    {#- The conditions that keep the batch's partitions, one a column. -#}
    {%- set conditions = [] -%}
    {%- for name, found in partitions.items() -%}
        {%- set column = alias ~ '.' ~ adapter.quote(name) -%}
        {%- set alternatives = [] -%}
        {%- if found.literals -%}
            {%- do alternatives.append(column ~ ' in (' ~ found.literals ~ ')') -%}
        {%- elif found.minimum is not none -%}
            {%- do alternatives.append(column ~ ' between ' ~ found.minimum ~ ' and ' ~ found.maximum) -%}
        {%- endif -%}
        {%- if found.has_null -%}
            {%- do alternatives.append(column ~ ' is null') -%}
        {%- endif -%}
        {%- do conditions.append('(' ~ (alternatives or ['false']) | join(' or ') ~ ')') -%}
    {%- endfor -%}
    {{ return(conditions) }}
{% endmacro %}


{% macro _merger_same_key(merger, left, right) %}
    {%- set conditions = [] -%}
    {%- for name in merger.key -%}
        {%- set equals = ' <=> ' if name in merger.nullable_key else ' = ' -%}
        {%- do conditions.append(left ~ '.' ~ adapter.quote(name) ~ equals ~ right ~ '.' ~ adapter.quote(name)) -%}
    {%- endfor -%}
    {{ return(conditions) }}
{% endmacro %}


{% macro _merger_newer(merger, batch, stored, known=none) %}
    {#-
        Whether the batch's row, or the change that its known value comes from, is newer than the stored row. Structs
        compare field by field and take NULL for the least: a stored row without a sequence is the oldest.
    -#}
    {%- set row = 'struct(' ~ (lakehouse_patterns.quoted_names(merger.sequence, batch) | join(', ')) ~ ')' -%}
    {{ return(
        (known or row) ~ ' > struct(' ~ (lakehouse_patterns.quoted_names(merger.sequence, stored) | join(', ')) ~ ')'
    ) }}
{% endmacro %}


{% macro _merger_updated(merger, name, batch, stored) %}
    {#- What a matched row gets in one column. -#}
    {%- set new, old = batch ~ '.' ~ adapter.quote(name), stored ~ '.' ~ adapter.quote(name) -%}
    {%- if name not in merger.keep_on_null -%}
        {{ return(new) }}
    {%- elif not merger.sequence -%}
        {{ return('coalesce(' ~ new ~ ', ' ~ old ~ ')') }}
    {%- endif -%}
    {%- set known = batch ~ '.lakehouse_patterns_known_' ~ (merger.keep_on_null.index(name) + 1) -%}
    {{ return(
        'case when ' ~ lakehouse_patterns._merger_newer(merger, batch, stored, known) ~ ' then ' ~ new ~ ' else ' ~ old
        ~ ' end'
    ) }}
{% endmacro %}


{% macro _merger_merge(merger, batch, target, columns, looked_up, incremental_predicates) %}
    {#-
        Stale rows leave the batch before the merge: Delta rewrites each file that holds a matched row, even when no
        clause applies to it, and a rerun shall write nothing.

        `rand() < 1` is always true and makes the batch nondeterministic for Delta, which then evaluates it once, before
        anything else, and keeps it; otherwise it would be evaluated for finding the files and again for writing them.
    -#}
    {%- if looked_up.is_empty -%}
        {{ return('select 0 as merged_rows') }}
    {%- endif -%}
    {%- set source, stored = 'DBT_INTERNAL_SOURCE', 'DBT_INTERNAL_DEST' -%}
    {%- set deleted = source ~ '.' ~ adapter.quote(merger.is_deleted) if merger.deletes == 'hard' -%}
    {%- set newer = ' and ' ~ lakehouse_patterns._merger_newer(merger, source, stored) if merger.sequence else '' -%}
    merge into {{ target }} as {{ stored }}
    using (
        select batch.*
        from (
            {{ lakehouse_patterns._merger_latest(
                merger, batch, looked_up.partitions, with_known=merger.sequence | length > 0
            ) }}
        ) as batch
        {%- if looked_up.may_be_stale %}
        left anti join {{ target }} as stored
            on {{ (
                lakehouse_patterns._merger_same_key(merger, 'batch', 'stored')
                + lakehouse_patterns._merger_pruned(looked_up.partitions, 'stored')
                + ['not ' ~ lakehouse_patterns._merger_newer(merger, 'batch', 'stored')]
            ) | join('\n            and ') }}
        {%- endif %}
        where rand() < 1
    ) as {{ source }}
    on {{ (
        lakehouse_patterns._merger_same_key(merger, source, stored)
        + lakehouse_patterns._merger_pruned(looked_up.partitions, stored)
        + incremental_predicates
    ) | join('\n        and ') }}
    {%- if deleted %}
    when matched and {{ deleted }}{{ newer }} then delete
    {%- endif %}
    when matched{{ newer }} then update set
        {%- for name in columns.updated %}
        {{ adapter.quote(name) }} = {{ lakehouse_patterns._merger_updated(merger, name, source, stored) }}
        {{- ',' if not loop.last }}
        {%- endfor %}
    when not matched{{ ' and not ' ~ deleted if deleted }} then insert (
        {{ lakehouse_patterns.quoted_names(columns.inserted) | join(', ') }}
    ) values (
        {{ lakehouse_patterns.quoted_names(columns.inserted, source) | join(', ') }}
    )
{% endmacro %}
