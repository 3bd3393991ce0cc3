{#-
    Merger: what a merge looks up before it starts, so that it reads the batch's partitions alone and spares a join when
    no stored row can be as new as one of the batch.
-#}

{% macro _merger_look_up(merger, batch, target) %}
    {#-
        Facts that the merge needs beforehand. `partitions`: the batch's values of each column of prune_by, as SQL:
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
    {%- set as_new = ['stored.' ~ lakehouse_patterns.quoted_name(merger.sequence[0]) ~ ' >= ' ~ least_sequence] -%}
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
            {{ 'min(' ~ lakehouse_patterns.quoted_name(merger.sequence[0]) ~ ')' if sequence_literal else 'null' }} as first_sequence
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
        {%- set column = lakehouse_patterns.quoted_name(name, alias) -%}
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
