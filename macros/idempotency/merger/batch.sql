{#- Merger: the rows of a batch as they are applied, one a key, checked. -#}

{% macro _merger_latest(merger, batch, partitions={}, with_known=false) %}
    {#-
        The batch's newest row of each key. Ties are broken by all other columns (a deletion first), so that the
        order in which rows are read decides nothing. A column of keep_on_null has its newest value that is known; with
        a sequence, `lakehouse_patterns_known_<n>` tells from which change, for it may be older than what is stored.

        The checks sit in the key, below everything else: no plan can spare them, drop the row before them, or lose
        a row that its siblings hide. The window distributes rows by the key anyway. `distribute by` does it for a batch of
        one partition too, so that a check never fails inside the task that writes, under a stack trace.
    -#}
    {%- set order = lakehouse_patterns.quoted_names(merger.sequence) -%}
    {%- if merger.is_deleted -%}
        {%- do order.append(lakehouse_patterns.quoted_name(merger.is_deleted)) -%}
    {%- endif -%}
    {%- for name, type in merger.types.items() if name not in merger.key + merger.sequence + [merger.is_deleted] -%}
        {%- set quoted = lakehouse_patterns.quoted_name(name) -%}
        {%- do order.append(
            quoted if lakehouse_patterns.is_sortable(type)
            else lakehouse_patterns.json_text('struct(' ~ quoted ~ ')')
        ) -%}
    {%- endfor -%}
    {%- set key = lakehouse_patterns.quoted_names(merger.key) -%}
    {%- set newest_first -%}
        partition by {{ key | join(', ') }}
                order by {{ (order or key) | join(' desc, ') }} desc
    {%- endset -%}
    {%- set columns = [] -%}
    {%- for name in merger.types -%}
        {%- set known = 'lakehouse_patterns_known_' ~ (merger.keep_on_null.index(name) + 1) if name in merger.keep_on_null -%}
        {%- do columns.append(known ~ '.value as ' ~ lakehouse_patterns.quoted_name(name) if known else lakehouse_patterns.quoted_name(name)) -%}
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
                    batch.{{ lakehouse_patterns.quoted_name(name) }}
                {%- endif %} as {{ lakehouse_patterns.quoted_name(name) }}
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
    {%- set key = lakehouse_patterns.quoted_name(merger.key[0], alias) -%}
    {%- set required = lakehouse_patterns.required_columns(merger) -%}
    {%- if required or partitions -%}
        case
            {%- if required %}
            when {{ lakehouse_patterns.is_incomplete(merger, alias) }}
                then {{ lakehouse_patterns.refuse_incomplete(merger, alias, 'row') }}
            {%- endif %}
            {%- if partitions %}
            when not coalesce({{ lakehouse_patterns._merger_pruned(partitions, alias) | join(' and ') }}, false)
                then raise_error({{ lakehouse_patterns.text_literal(
                    'lakehouse_patterns: the source of ' ~ merger.relation
                    ~ ' changed while the model was running, run it again'
                ) }})
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
        where not {{ lakehouse_patterns.quoted_name(merger.is_deleted) }}
    {%- else -%}
        {{ lakehouse_patterns._merger_latest(merger, batch) }}
    {%- endif -%}
{%- endmacro %}
